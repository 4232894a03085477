"""Ctrl-C: the first ends what is going on in good order, the second ends the process."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

__all__ = ["interruptible"]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within, the first Ctrl-C raises KeyboardInterrupt and the second kills; may be nested.

    A callback of compiled code (the kernels' compiler has one) cannot pass the exception on. Python would report it as
    unraisable; whatever then fails for want of the callback's work is the interrupt all the same.
    """
    interrupted = False

    def first(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    def unraisable(problem: sys.UnraisableHookArgs) -> None:
        if not issubclass(problem.exc_type, KeyboardInterrupt):
            hook_before(problem)

    before, hook_before = signal.signal(signal.SIGINT, first), sys.unraisablehook
    sys.unraisablehook = unraisable
    try:
        yield
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = hook_before
        signal.signal(signal.SIGINT, before)
