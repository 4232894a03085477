"""The MTP (NextN) head: one attention layer that guesses the token after next.

Row i takes token t_i and the main model's post-norm hidden of the position before it, and predicts t_(i + 1):

    x = eh_proj [norm(embedding(t_i)) ; norm(hidden_(i - 1))];  x += attention(norm(x));  x += feed_forward(norm(x))
    hidden' = norm(x);  logits = output hidden'

To draft further, the next row takes the guessed token and the head's own hidden'.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.hparams import LayerConfig
from dotllm.models.base import Loader
from dotllm.models.decoder import Decoder
from dotllm.models.layers import Attention, DenseFeedForward, ExpertFeedForward
from dotllm.ops.protocol import Array, KvLayer, Rows

__all__ = ["NextN"]


class NextN:
    """The head of the qwen35 family; its own embedding, output matrix and final norm are optional."""

    def __init__(self, load: Loader, prefix: str, layer: LayerConfig, main: Decoder) -> None:
        self.ops, self.ws, self.config = load.ops, load.workspace, load.config
        vocabulary, width = load.config.vocab_size, load.config.embedding_length
        own = f"{prefix}nextn."
        self.embedding, self.output, self.final_norm = main.embedding, main.output, main.output_norm
        if load.has(f"{own}embed_tokens.weight"):
            self.embedding = load.table(f"{own}embed_tokens.weight", vocabulary, width)
        if load.has(f"{own}shared_head_head.weight"):
            self.output = load.matrix(f"{own}shared_head_head.weight", vocabulary, width)
        if load.has(f"{own}shared_head_norm.weight"):
            self.final_norm = load.vector(f"{own}shared_head_norm.weight", width)
        self.projection = load.matrix(f"{own}eh_proj.weight", width, 2 * width)
        self.embedding_norm = load.vector(f"{own}enorm.weight", width)
        self.hidden_norm = load.vector(f"{own}hnorm.weight", width)
        self.attention_norm = load.vector(f"{prefix}attn_norm.weight", width)
        self.attention = Attention(load, prefix, layer)
        self.feed_forward_norm = load.vector(f"{prefix}post_attention_norm.weight", width)
        self.feed_forward: DenseFeedForward | ExpertFeedForward = (
            ExpertFeedForward(load, prefix) if layer.experts else DenseFeedForward(load, prefix, layer)
        )

    def forward(
        self, tokens: NDArray[np.int32], hidden: Array, rows: Rows, kv: KvLayer, *, logits: bool
    ) -> tuple[Array | None, Array]:
        """Tokens (M,), hidden (M, E) -> logits (M, V) if wanted, own hidden (M, E)."""
        given = self.ws.rows("given", len(tokens), self.config.embedding_length)
        self.ops.copy(hidden, given)

        def build(tokens: NDArray[np.int32], *where: NDArray[np.int32]) -> tuple[Array | None, Array]:
            return self._pass(tokens, given, Rows(*where), kv, logits=logits)

        passed: tuple[Array | None, Array] = self.ops.recorded(
            self, logits, build, (tokens, *rows.arrays), (given, kv.k, kv.v)
        )
        return passed

    def _pass(
        self, tokens: NDArray[np.int32], hidden: Array, rows: Rows, kv: KvLayer, *, logits: bool
    ) -> tuple[Array | None, Array]:
        ops, eps, m, width = self.ops, self.config.rms_epsilon, len(tokens), self.config.embedding_length
        embedded, joined = self.ws.rows("embedded", m, width), self.ws.rows("joined", m, 2 * width)
        x, own = self.ws.rows("x", m, width), self.ws.rows("mtp_hidden", m, width)
        ops.embed(self.embedding, tokens, self.config.embedding_scale, embedded)
        ops.rms_norm(embedded, self.embedding_norm, eps, joined)
        ops.rms_norm(hidden, self.hidden_norm, eps, joined, column=width)
        ops.linear(ops.prepare(joined, None, eps, [self.projection]), [self.projection], [x])
        h = ops.prepare(x, self.attention_norm, eps, self.attention.inputs)
        self.attention(h, rows, kv, x)
        h = ops.prepare(x, self.feed_forward_norm, eps, self.feed_forward.inputs)
        self.feed_forward(h, x)
        ops.rms_norm(x, self.final_norm, eps, own)
        if not logits:
            return None, own
        out = self.ws.rows("mtp_logits", m, self.config.vocab_size)
        ops.linear(ops.prepare(own, None, eps, [self.output]), [self.output], [out])
        return out, own
