"""Runs models through the state manager, row by row or in chunks, for tests that look at logits."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.batch import Batch
from dotllm.gguf.reader import GGUFFile
from dotllm.models.base import Model
from dotllm.models.registry import load_model
from dotllm.ops.protocol import Array, CacheType, KvLayer, Ops, Rows
from dotllm.state.blocks import pages_for
from dotllm.state.layout import StateLayout
from dotllm.state.manager import Extend, Sequence, StateManager

__all__ = ["Run", "open_model"]

F32 = NDArray[np.float32]


def open_model(path: Path, ops: Ops, context: int = 512) -> Model:
    with GGUFFile.open(path) as file:
        return load_model(file, ops, context=context)


@dataclass
class Run:
    """Sequences of one model in one state; `extend` is one committed step."""

    model: Model
    ops: Ops
    state: StateManager

    @classmethod
    def of(
        cls, model: Model, ops: Ops, *, sequences: int = 1, context: int = 512, cache_type: CacheType = "f32"
    ) -> Run:
        layout, mtp = StateLayout.of(model.config), model.mtp is not None
        pages = sequences * pages_for(context)
        return cls(
            model, ops, StateManager(ops, layout, pages=pages, sequences=sequences, cache_type=cache_type, mtp=mtp)
        )

    def extend(self, sequences: Items[Sequence], tokens: Items[Items[int]]) -> list[F32]:
        """Logits (rows, V) of each sequence for all its new tokens."""
        with self.state.begin([Extend(s, len(t)) for s, t in zip(sequences, tokens, strict=True)]) as step:
            counts = [len(t) for t in tokens]
            batch = Batch.build(tokens, [s.length for s in sequences], counts)
            hidden = self.model.forward(batch, step)
            logits = self.ops.get(self.model.logits(hidden, batch.logit_rows))
            step.commit(counts, hidden)
        return np.split(logits, np.cumsum(counts)[:-1])

    def logits(self, tokens: Items[int], chunk: int = 512) -> F32:
        """Logits (n, V) of a new sequence, prefilled in chunks; the sequence is closed."""
        sequence = self.state.open()
        parts = [self.extend([sequence], [tokens[i : i + chunk]])[0] for i in range(0, len(tokens), chunk)]
        self.state.close(sequence)
        return np.concatenate(parts)

    def mtp_logits(self, tokens: Items[int], chunk: int = 512) -> F32:
        """Logits (n, V) of the MTP head for the rows (token i, hidden i - 1), the first with zeros."""
        head, ids = self.model.mtp, np.array(tokens, np.int32)
        if head is None:
            raise ValueError("this model has no MTP head")
        out: dict[str, Any] = {}

        def run(rows: Rows, hidden: Array, kv: KvLayer) -> None:
            scores, _ = head.forward(ids[rows.positions], hidden, rows, kv, logits=True)
            for position, row in zip(rows.positions, self.ops.get(scores), strict=True):
                out[int(position)] = row

        sequence = self.state.open()
        for i in range(0, len(tokens), chunk):
            self.extend([sequence], [tokens[i : i + chunk]])
            self.state.flush([sequence], run)
        self.state.close(sequence)
        return np.stack([out[i] for i in range(len(tokens))])

    def greedy(self, prompt: Items[int], count: int) -> list[int]:
        sequence = self.state.open()
        logits, out = self.extend([sequence], [prompt])[0][-1], []
        for _ in range(count):
            out.append(int(logits.argmax()))
            logits = self.extend([sequence], [out[-1:]])[0][-1]
        self.state.close(sequence)
        return out
