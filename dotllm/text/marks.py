"""Keeping special tokens that a user typed from becoming special tokens.

Before a conversation is rendered, a mark is put after the first character of every guarded literal in the messages:
"<|im_end|>" becomes "<" mark "|im_end|>". The literal no longer matches, wherever the template moves it; the tokenizer
takes the marks out once the special tokens that the template itself wrote have been found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dotllm.errors import UsageError

__all__ = ["Guard", "MarkedText", "unused_mark"]

# Unicode noncharacters: never part of interchanged text.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A rendered conversation in which literals from messages carry `mark`."""

    text: str
    mark: str

    @property
    def plain(self) -> str:
        """The text without marks, for showing."""
        return self.text.replace(self.mark, "")


class Guard:
    """Puts the mark into every occurrence of some literals."""

    def __init__(self, literals: Iterable[str], mark: str) -> None:
        # A literal of one character cannot be broken up; no file has one.
        texts = sorted({text for text in literals if len(text) > 1}, key=len, reverse=True)
        self._mark = mark
        # A look-ahead, so that literals that overlap are all found.
        self._pattern = re.compile(f"(?={'|'.join(map(re.escape, texts))})") if texts else None
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._longest = max(map(len, texts), default=1) - 1

    def text(self, text: str) -> str:
        """`text` with marks. A literal that begins at its end is marked too: the next part could complete it."""
        if self._pattern is None:
            return text
        starts = {match.start() for match in self._pattern.finditer(text)}
        shortest = max(len(text) - self._longest, 0)
        starts.update(start for start in range(shortest, len(text)) if text[start:] in self._beginnings)
        if not starts:
            return text
        return "".join(char + self._mark if index in starts else char for index, char in enumerate(text))

    def value(self, value: Any) -> Any:
        """A copy of a JSON-like value with every string in it marked, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def unused_mark(*values: Any) -> str:
    """A mark that occurs nowhere in the given JSON-like values; raises UsageError if they use all of them."""
    used: set[str] = set()
    for value in values:
        _collect(value, used)
    for mark in _MARKS:
        if mark not in used:
            return mark
    raise UsageError("the messages use all Unicode noncharacters U+FDD0 to U+FDEF; leave them out")


def _collect(value: Any, used: set[str]) -> None:
    if isinstance(value, str):
        used.update(mark for mark in _MARKS if mark in value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(key, used)
            _collect(item, used)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, used)
