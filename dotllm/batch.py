"""A batch: flat rows of tokens, all that a model ever sees of the sequences behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """M rows of S sequences; rows of a sequence are neighbours, in order of position.

    `tokens` and `positions` (M,) int32; `starts` (S + 1,) int32: rows of sequence s are starts[s] .. starts[s + 1];
    `logit_rows` int32: the rows whose logits are wanted, in order.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    starts: NDArray[np.int32]
    logit_rows: NDArray[np.int32]

    @classmethod
    def build(cls, tokens: Sequence[Sequence[int]], first: Sequence[int], logits: Sequence[int]) -> Batch:
        """One entry a sequence: its tokens, the position of the first, and how many of its last rows want logits."""
        starts = np.zeros(len(tokens) + 1, np.int32)
        np.cumsum([len(t) for t in tokens], out=starts[1:])
        flat = np.fromiter((t for part in tokens for t in part), np.int32, int(starts[-1]))
        positions = [np.arange(p, p + len(t), dtype=np.int32) for p, t in zip(first, tokens, strict=True)]
        wanted = [np.arange(e - n, e, dtype=np.int32) for e, n in zip(starts[1:], logits, strict=True)]
        return cls(flat, np.concatenate(positions), starts, np.concatenate(wanted))

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1
