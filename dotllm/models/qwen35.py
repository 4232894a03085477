"""Qwen3.5 and 3.6, their MoE form, and Qwen3-Next: Gated DeltaNet layers with a gated attention layer now and then."""

from __future__ import annotations

from itertools import count

from dotllm.gguf.hparams import LayerConfig
from dotllm.models.base import Loader
from dotllm.models.decoder import Decoder
from dotllm.models.layers import Attention, DenseFeedForward, ExpertFeedForward, GatedDeltaNet
from dotllm.models.mtp import NextN
from dotllm.ops.protocol import Array, Rows
from dotllm.state.step import Step

__all__ = ["Qwen35"]


class Qwen35Layer:
    """x += mixer(norm(x)); x += feed_forward(norm(x)). The mixer is attention or Gated DeltaNet."""

    def __init__(self, load: Loader, prefix: str, layer: LayerConfig, index: int) -> None:
        """`index` counts the layers of the same kind: it is where this layer's state lives."""
        self.ops, self.eps, self.index = load.ops, load.config.rms_epsilon, index
        width, recurrent = load.config.embedding_length, load.config.recurrent
        self.mixer_norm = load.vector(f"{prefix}attn_norm.weight", width)
        self.mixer: Attention | GatedDeltaNet
        if layer.kind == "recurrent" and recurrent is not None:
            self.mixer = GatedDeltaNet(load, prefix, recurrent, index)
        else:
            self.mixer = Attention(load, prefix, layer)
        self.feed_forward_norm = load.vector(f"{prefix}post_attention_norm.weight", width)
        self.feed_forward = feed_forward(load, prefix, layer)

    def __call__(self, x: Array, rows: Rows, step: Step) -> None:
        ops, eps = self.ops, self.eps
        h = ops.prepare(x, self.mixer_norm, eps, self.mixer.inputs)
        if isinstance(self.mixer, GatedDeltaNet):
            self.mixer(h, rows, step, x)
        else:
            self.mixer(h, rows, step.kv[self.index], x)
        h = ops.prepare(x, self.feed_forward_norm, eps, self.feed_forward.inputs)
        self.feed_forward(h, x)


def feed_forward(load: Loader, prefix: str, layer: LayerConfig) -> DenseFeedForward | ExpertFeedForward:
    return ExpertFeedForward(load, prefix) if layer.experts else DenseFeedForward(load, prefix, layer)


class Qwen35(Decoder):
    """A stack of hybrid layers, and the MTP head where the file has a whole one."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        index = {"attention": count(), "recurrent": count()}
        self.layers = [
            Qwen35Layer(load, f"blk.{i}.", layer, next(index[layer.kind])) for i, layer in enumerate(self.config.layers)
        ]
        if self.config.mtp is not None:
            self.mtp = NextN(load, f"blk.{len(self.layers)}.", self.config.mtp, self)

    def layers_forward(self, x: Array, rows: Rows, step: Step) -> None:
        for layer in self.layers:
            layer(x, rows, step)
