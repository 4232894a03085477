"""Turning tokens into text as they come: never half a character, never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dotllm.errors import UsageError

__all__ = ["Mark", "TextStream", "TokenBytes", "partial_suffix"]

_DECODER = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """The part of a tokenizer that a stream needs."""

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a stream to come back to: bytes of an unfinished character, text held back, the stop string found."""

    bytes_held: bytes
    text_held: str
    stop_string: str | None


class TextStream:
    """Detokenises one reply.

    `push` returns text as soon as it is certain: whole characters that cannot be the beginning of a stop string. Text
    from a stop string on is dropped. `mark` and `restore` cost O(1), so drafts can be tried and undone.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = (), *, special: bool = False) -> None:
        """`special` shows control tokens too. Raises UsageError for an empty stop string."""
        if any(not text for text in stop):
            raise UsageError("a stop string is empty; leave it out")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._special = special
        self._state = Mark(b"", "", None)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found, or None."""
        return self._state.stop_string

    @property
    def stopped(self) -> bool:
        return self._state.stop_string is not None

    def mark(self) -> Mark:
        """The present state; give it to `restore` to undo what is pushed from now on."""
        return self._state

    def restore(self, mark: Mark) -> None:
        self._state = mark

    def push(self, token_id: int) -> str:
        """Text that this token makes certain, possibly "". After a stop string always "". Raises UsageError."""
        data = self._tokenizer.token_bytes(token_id, special=self._special)
        if self.stopped:
            return ""
        decoder = _DECODER(errors="replace")
        text = self._state.text_held + decoder.decode(self._state.bytes_held + data)
        return self._release(text, decoder.getstate()[0])

    def finish(self) -> str:
        """What was held back, once no more tokens come; an unfinished character becomes one U+FFFD."""
        if self.stopped:
            return ""
        text = self._state.text_held + ("\ufffd" if self._state.bytes_held else "")
        self._state = Mark(b"", "", None)
        return text

    def _release(self, text: str, bytes_held: bytes) -> str:
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            # The first to be complete counts, as if text came one character at a time; of two, the longer.
            _, start, stop = min(found)
            self._state = Mark(b"", "", stop)
            return text[:start]
        held = max((partial_suffix(text, stop) for stop in self._stop), default=0)
        self._state = Mark(bytes_held, text[len(text) - held :], None)
        return text[: len(text) - held]


def partial_suffix(text: str, target: str) -> int:
    """Length of the longest end of `text` that is a beginning of `target`, but not all of it."""
    for length in range(min(len(text), len(target) - 1), 0, -1):
        if target.startswith(text[len(text) - length :]):
            return length
    return 0
