"""Llama 2 and 3, Mistral, SmolLM2, Qwen2 and Qwen3: pre-norm attention and SwiGLU.

Qwen2 has biases on q, k and v; Qwen3 norms each q and k head; Llama rotates adjacent pairs: the tensors and the
configuration say which, the layers do it.
"""

from __future__ import annotations

from dotllm.gguf.hparams import LayerConfig
from dotllm.models.base import Loader
from dotllm.models.decoder import Decoder
from dotllm.models.layers import Attention, DenseFeedForward
from dotllm.ops.protocol import Array, KvLayer, Rows
from dotllm.state.step import Step

__all__ = ["Llama"]


class LlamaLayer:
    """x += attention(norm(x)); x += feed_forward(norm(x))."""

    def __init__(self, load: Loader, prefix: str, layer: LayerConfig) -> None:
        self.ops, self.eps = load.ops, load.config.rms_epsilon
        width = load.config.embedding_length
        self.attention_norm = load.vector(f"{prefix}attn_norm.weight", width)
        self.attention = Attention(load, prefix, layer)
        self.feed_forward_norm = load.vector(f"{prefix}ffn_norm.weight", width)
        self.feed_forward = DenseFeedForward(load, prefix, layer)

    def __call__(self, x: Array, rows: Rows, kv: KvLayer) -> None:
        ops, eps = self.ops, self.eps
        h = ops.prepare(x, self.attention_norm, eps, self.attention.inputs)
        self.attention(h, rows, kv, x)
        h = ops.prepare(x, self.feed_forward_norm, eps, self.feed_forward.inputs)
        self.feed_forward(h, x)


class Llama(Decoder):
    """A stack of Llama layers."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        self.layers = [LlamaLayer(load, f"blk.{i}.", layer) for i, layer in enumerate(self.config.layers)]

    def layers_forward(self, x: Array, rows: Rows, step: Step) -> None:
        for layer, kv in zip(self.layers, step.kv, strict=True):
            layer(x, rows, kv)
