"""A decoder: embedding, layers, final norm and output matrix. A family adds its layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dotllm.batch import Batch
from dotllm.models.base import Loader, MtpHead
from dotllm.ops.protocol import Array, Rows
from dotllm.state.step import Step

__all__ = ["Decoder"]


class Decoder:
    """Embedding, layers, final norm and output matrix; a family says what one layer is."""

    mtp: MtpHead | None = None

    def __init__(self, load: Loader) -> None:
        self.config, self.ops, self.ws = load.config, load.ops, load.workspace
        vocabulary, width = self.config.vocab_size, self.config.embedding_length
        self.embedding = load.table("token_embd.weight", vocabulary, width)
        self.output_norm = load.vector("output_norm.weight", width)
        name = "token_embd.weight" if self.config.tied_output else "output.weight"
        self.output = load.matrix(name, vocabulary, width)

    def layers_forward(self, x: Array, rows: Rows, step: Step) -> None:
        """All layers, in place on the residual stream x (M, E)."""
        raise NotImplementedError

    def forward(self, batch: Batch, step: Step) -> Array:
        rows = step.bind(batch)

        def build(tokens: NDArray[np.int32], *where: NDArray[np.int32]) -> Array:
            return self._pass(tokens, Rows(*where), step)

        return self.ops.recorded(step.memory, (self, step.logged), build, (batch.tokens, *rows.arrays))

    def _pass(self, tokens: NDArray[np.int32], rows: Rows, step: Step) -> Array:
        x = self.ws.rows("x", len(tokens), self.config.embedding_length)
        hidden = self.ws.rows("hidden", len(tokens), self.config.embedding_length)
        self.ops.embed(self.embedding, tokens, self.config.embedding_scale, x)
        self.layers_forward(x, rows, step)
        self.ops.rms_norm(x, self.output_norm, self.config.rms_epsilon, hidden)
        return hidden

    def logits(self, hidden: Array, rows: NDArray[np.int32]) -> Array:
        return self.ops.recorded(self, "logits", lambda chosen: self._logits(hidden, chosen), (rows,), (hidden,))

    def _logits(self, hidden: Array, rows: NDArray[np.int32]) -> Array:
        chosen = self.ws.rows("chosen", len(rows), self.config.embedding_length)
        logits = self.ws.rows("logits", len(rows), self.config.vocab_size)
        self.ops.gather(hidden, rows, chosen)
        prepared = self.ops.prepare(chosen, None, self.config.rms_epsilon, [self.output])
        self.ops.linear(prepared, [self.output], [logits])
        if self.config.logit_softcap:
            self.ops.softcap(logits, self.config.logit_softcap)
        return logits
