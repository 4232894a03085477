"""What goes to the terminal: model text on standard output, everything else on standard error, colour where wanted."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import IO

__all__ = ["Console", "bytes_text", "rate_text", "safe", "set_log_level"]

_STYLES = {"red": "31", "yellow": "33", "green": "32", "cyan": "36", "dim": "2", "bold": "1"}
# What a terminal would obey: C0 but tab and newline, DEL, C1. Model text and metadata are not trusted with it.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def safe(text: str) -> str:
    """The text with every control character but tab and newline made visible."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def bytes_text(count: float) -> str:
    """1234567 as 1.2 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def rate_text(tokens: int, milliseconds: float) -> str:
    """Tokens per second, or a dash where nothing was measured."""
    return f"{tokens * 1000 / milliseconds:.1f}" if tokens and milliseconds > 0 else "-"


class Console:
    """Standard output for text, standard error for notes; `quiet` leaves only errors."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.out, self.err = sys.stdout, sys.stderr
        self.interactive = sys.stdin.isatty() and self.out.isatty()

    def style(self, text: str, style: str, stream: IO[str] | None = None) -> str:
        """Text in a colour, if the stream (standard error if None) is a terminal and NO_COLOR is not set."""
        stream = self.err if stream is None else stream
        if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"

    def note(self, text: str, style: str | None = None) -> None:
        """A line on standard error, unless quiet."""
        if not self.quiet:
            self._line(text, style)

    def answer(self, text: str) -> None:
        """A line on standard error that was asked for, so shown even if quiet."""
        self._line(text, "dim")

    def error(self, text: str) -> None:
        """A line on standard error, always."""
        self._line(text, "red")

    def progress(self, text: str) -> None:
        """What is going on: rewritten in place on a terminal. `text` "" wipes it away."""
        if self.quiet or not self.err.isatty():
            return
        self.err.write("\r\x1b[2K" + text)
        self.err.flush()

    def write(self, text: str, style: str | None = None) -> None:
        """Text on standard output at once; what a terminal would obey is made visible there."""
        text = safe(text) if self.out.isatty() else text
        self.out.write(text if style is None else self.style(text, style, self.out))
        self.out.flush()

    def _line(self, text: str, style: str | None) -> None:
        text = safe(text)
        self.err.write((text if style is None else self.style(text, style)) + "\n")
        self.err.flush()


class _Brief(logging.Formatter):
    """A record in one line: no traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


def set_log_level(*, verbose: bool, quiet: bool) -> None:
    """Log records of dotllm go to standard error: warnings, everything with `verbose`, errors alone with `quiet`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((logging.Formatter if verbose else _Brief)("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("dotllm")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING)
