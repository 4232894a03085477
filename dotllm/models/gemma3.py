"""Gemma 3: norms on both sides of each branch, GELU gates, five local (windowed) layers to one global."""

from __future__ import annotations

from dotllm.gguf.hparams import LayerConfig
from dotllm.models.base import Loader
from dotllm.models.decoder import Decoder
from dotllm.models.layers import Attention, DenseFeedForward
from dotllm.ops.protocol import Array, KvLayer, Rows
from dotllm.state.step import Step

__all__ = ["Gemma3"]


class Gemma3Layer:
    """x += norm(attention(norm(x))); x += norm(feed_forward(norm(x)))."""

    def __init__(self, load: Loader, prefix: str, layer: LayerConfig) -> None:
        self.ops, self.ws, self.eps = load.ops, load.workspace, load.config.rms_epsilon
        width = load.config.embedding_length
        self.attention_norm = load.vector(f"{prefix}attn_norm.weight", width)
        self.attention = Attention(load, prefix, layer)
        self.attention_post_norm = load.vector(f"{prefix}post_attention_norm.weight", width)
        self.feed_forward_norm = load.vector(f"{prefix}ffn_norm.weight", width)
        self.feed_forward = DenseFeedForward(load, prefix, layer)
        self.feed_forward_post_norm = load.vector(f"{prefix}post_ffw_norm.weight", width)

    def __call__(self, x: Array, rows: Rows, kv: KvLayer) -> None:
        ops, eps = self.ops, self.eps
        branch = self.ws.rows("branch", *x.shape)
        h = ops.prepare(x, self.attention_norm, eps, self.attention.inputs)
        self.attention(h, rows, kv, branch, add=False)
        ops.rms_norm(branch, self.attention_post_norm, eps, x, add=True)
        h = ops.prepare(x, self.feed_forward_norm, eps, self.feed_forward.inputs)
        self.feed_forward(h, branch, add=False)
        ops.rms_norm(branch, self.feed_forward_post_norm, eps, x, add=True)


class Gemma3(Decoder):
    """A stack of Gemma 3 layers."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        self.layers = [Gemma3Layer(load, f"blk.{i}.", layer) for i, layer in enumerate(self.config.layers)]

    def layers_forward(self, x: Array, rows: Rows, step: Step) -> None:
        for layer, kv in zip(self.layers, step.kv, strict=True):
            layer(x, rows, kv)
