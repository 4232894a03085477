"""Taking a reply apart as it streams: what the model thinks, and what it says."""

from __future__ import annotations

from typing import Literal

from dotllm.errors import UsageError
from dotllm.text.stream import partial_suffix

__all__ = ["Part", "ReasoningSplitter"]

Part = tuple[Literal["reasoning", "content"], str]


class ReasoningSplitter:
    """Splits a reply at `open` and `close` into reasoning and content; the tags themselves are dropped.

    There is one stretch of reasoning, at the beginning (after white space) or, with `starts_inside`, already begun by
    the prompt. A later tag is content: a reply may speak about tags. Line breaks that set the reasoning off from the
    tags and from the content are dropped too.
    """

    def __init__(self, open: str = "<think>", close: str = "</think>", *, starts_inside: bool = False) -> None:
        """Raises UsageError for an empty tag."""
        if not open or not close:
            raise UsageError("the tags around reasoning must not be empty")
        self._open = open
        self._close = close
        self._place: Literal["before", "reasoning", "between", "content"] = "reasoning" if starts_inside else "before"
        self._held = ""
        self._at_start = True

    def push(self, text: str) -> list[Part]:
        """The parts that this text makes certain, in order; none of them is empty."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back, once no more text comes. An unfinished tag is text."""
        held, self._held = self._held, ""
        if self._place == "reasoning":
            rest = self._without_margin(held).rstrip("\n")
            return [("reasoning", rest)] if rest else []
        if self._place == "between" or not held:
            return []
        return [("content", held)]

    def _step(self, parts: list[Part]) -> bool:
        """Deal with what is held; True if the place changed and there may be more to do."""
        if self._place == "before":
            return self._before()
        if self._place == "reasoning":
            return self._reasoning(parts)
        if self._place == "between":
            self._held = self._held.lstrip("\r\n")
            self._place = "content" if self._held else "between"
            return self._place == "content"
        if self._held:
            parts.append(("content", self._held))
            self._held = ""
        return False

    def _before(self) -> bool:
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._held = start[len(self._open) :]
            self._place = "reasoning"
            return True
        if self._open.startswith(start):
            return False
        self._place = "content"
        return True

    def _reasoning(self, parts: list[Part]) -> bool:
        text, closed, rest = self._held.partition(self._close)
        text = self._without_margin(text)
        if closed:
            if text.rstrip("\n"):
                parts.append(("reasoning", text.rstrip("\n")))
            self._held, self._place = rest, "between"
            return True
        held = partial_suffix(text, self._close)
        certain = text[: len(text) - held].rstrip("\n")
        if certain:
            parts.append(("reasoning", certain))
        self._at_start = self._at_start and not certain
        self._held = text[len(certain) :]
        return False

    def _without_margin(self, text: str) -> str:
        return text.lstrip("\n") if self._at_start else text
