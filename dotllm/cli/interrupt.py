"""Ctrl-C: the first ends what is going on in good order, the second ends the process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["interruptible"]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within, the first Ctrl-C raises KeyboardInterrupt and the second kills; may be nested."""

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
