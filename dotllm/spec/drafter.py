"""What guesses tokens ahead. A drafter changes how fast words come, never which words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dotllm.spec.verify import Cursor
from dotllm.state.manager import Step

__all__ = ["Drafter", "NoDrafter"]


class Drafter(Protocol):
    """Asked twice a step: before the state is reserved how deep it may go, then, inside the step, for the tokens."""

    def depth(self, cursor: Cursor) -> int:
        """The greatest number of tokens it would draft for this request now; the plan may grant fewer."""

    def propose(self, step: Step, cursors: Sequence[Cursor], depths: Sequence[int]) -> Sequence[Sequence[int]]:
        """Draft tokens of each sequence of the step, in its order: at most the granted depth, perhaps none."""


class NoDrafter:
    """Plain decoding."""

    def depth(self, cursor: Cursor) -> int:
        return 0

    def propose(self, step: Step, cursors: Sequence[Cursor], depths: Sequence[int]) -> Sequence[Sequence[int]]:
        return [()] * len(cursors)
