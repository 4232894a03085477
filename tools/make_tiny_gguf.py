"""Write small GGUF models with random weights: every architecture, every tensor type, with or without an MTP head.

    python tools/make_tiny_gguf.py OUT.gguf --arch qwen35 --type Q4_K [--seed 0] [--set layers=8 --set untied=true]

Weights are scaled so that activations stay near 1 and logits spread by a few units. `--set` takes the fields of
`Options`; `make` takes them as keywords.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.gguf_writer import TensorInfo
from numpy.typing import NDArray
from quantize import quantize
from tiny_vocab import add_byte_pairs, add_pieces

from dotllm.gguf.types import FORMATS, GGMLType

__all__ = ["ARCHITECTURES", "HYBRID", "ModelWriter", "Options", "make"]

HYBRID = ("qwen35", "qwen35moe", "qwen3next")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", *HYBRID)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Sizes and variants. `layers` are main layers; `interval`, `state` .. `conv` belong to recurrent layers."""

    name: str = ""  # tiny-ARCH if there is none
    layers: int = 4
    interval: int = 2
    embedding: int = 64
    feed_forward: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotary: int = 16
    sections: tuple[int, ...] = (3, 3, 2, 0)
    state: int = 16
    k_heads: int = 2
    v_per_k: int = 2
    conv: int = 4
    experts: int = 6
    experts_used: int = 2
    rope_base: float = 1e7
    rope_factor: float = 0.0  # linear scaling; 0 writes no key
    rope_freqs: bool = False  # a tensor of divisors, as in Llama 3
    epsilon: float = 1e-6
    context: int = 4096
    window: int = 0
    vocab: str = "bpe"  # or "spm"
    vocab_size: int = 304
    untied: bool = False
    nextn: int = 1  # MTP blocks
    nextn_key: bool = True  # write nextn_predict_layers
    nextn_tensors: bool = True  # write the blocks
    nextn_counted: bool = True  # count the blocks in block_count
    own_head: bool = False  # the MTP block has an embedding and an output matrix of its own
    head_norm: bool = True  # the MTP block has a final norm of its own
    predictive: float | None = None  # 0.01 .. 0.03: the MTP head mimics the model, so that drafts are often accepted
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)  # end of a tensor's name -> its type
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # whole numbers, numbers, strings to add


def _defaults(arch: str, type: GGMLType) -> Options:
    options = Options(nextn=1 if arch in HYBRID else 0)
    if arch not in HYBRID:
        options = dataclasses.replace(options, layers=3, rope_base=1e6, rotary=options.head_dim)
    if arch == "llama":
        options = dataclasses.replace(options, untied=True)
    if arch == "gemma3":
        options = dataclasses.replace(options, layers=8, window=8, rope_factor=8.0)
    if FORMATS[type].elements > 32:  # rows of whole blocks
        sizes = {"embedding": 256, "feed_forward": 512, "head_dim": 64, "state": 64, "sections": (6, 6, 4, 0)}
        options = dataclasses.replace(options, **sizes, rotary=32 if arch in HYBRID else 64)
    if arch in ("llama", "qwen2"):
        head_dim = options.embedding // options.heads
        options = dataclasses.replace(options, head_dim=head_dim, rotary=head_dim)
    return options


def make(path: str | Path, arch: str = "qwen35", type: str = "F32", seed: int = 0, **options: Any) -> Path:
    """Write a model to `path`; `options` are fields of `Options`. The same arguments give the same bytes."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture {arch!r}: one of {', '.join(ARCHITECTURES)} is needed")
    chosen = dataclasses.replace(_defaults(arch, GGMLType[type]), **options)
    if chosen.predictive is not None:
        chosen = dataclasses.replace(chosen, untied=True)
    model = ModelWriter(Path(path), arch, GGMLType[type], seed, chosen)
    model.write()
    return Path(path)


class _Random:
    """Numbers that are the same on every machine and in every NumPy: raw Philox bits, then exact arithmetic only."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(seed)

    def _integers(self, *shape: int) -> NDArray[Any]:
        """0 .. 65535, as (*shape, 4)."""
        return self._bits.random_raw(int(np.prod(shape))).astype("<u8").view("<u2").reshape(*shape, 4)

    def uniform(self, low: float, high: float, size: int) -> NDArray[np.float64]:
        return low + (high - low) * (self._integers(size)[:, 0].astype(np.float64) / 65536.0)

    def normal(self, std: float, *shape: int) -> NDArray[np.float64]:
        """Nearly normal: the sum of four uniform numbers, which reaches 3.46 standard deviations."""
        total = self._integers(*shape).sum(-1, dtype=np.int64) - 131070
        return total.astype(np.float64) * (std / np.sqrt((65536.0**2 - 1.0) / 3.0))


class ModelWriter:
    """One file in the making: which tensors an architecture has, and values for them."""

    def __init__(self, path: Path, arch: str, type: GGMLType, seed: int, options: Options) -> None:
        self.arch, self.type, self.o = arch, type, options
        self.random = _Random(seed)
        self.writer = gguf.GGUFWriter(path, arch)
        self.gain = 1.0 if options.predictive is None else options.predictive

    # ---- tensors
    def put(self, name: str, values: NDArray[Any], *, exact: bool = False) -> None:
        """Add a tensor in the file's type; vectors, `exact` ones and rows that do not divide into blocks in F32."""
        type = self.type
        for end, other in self.o.overrides.items():
            if name.endswith(end):
                type = GGMLType[other]
        if exact or values.ndim == 1 or values.shape[-1] % FORMATS[type].elements:
            type = GGMLType.F32
        raw = quantize(values, type)
        # Entered directly: the writer's own method knows neither Q2_0 nor how large its blocks are.
        self.writer.tensors[-1][name] = TensorInfo(values.shape, type, raw.nbytes, raw)

    def normal(self, std: float, *shape: int) -> NDArray[Any]:
        return self.random.normal(std, *shape)

    def linear(self, name: str, outputs: int, inputs: int, gain: float = 1.5, *, exact: bool = False) -> None:
        self.put(f"{name}.weight", self.normal(gain / np.sqrt(inputs), outputs, inputs), exact=exact)

    def norm(self, name: str, size: int, base: float = 1.0) -> NDArray[Any]:
        weight = base + self.normal(0.2, size)
        self.put(f"{name}.weight", weight)
        return weight

    # ---- the file
    def write(self) -> None:
        o, hybrid = self.o, self.arch in HYBRID
        self.keys()
        pre = "qwen35" if self.arch in ("qwen35", "qwen35moe") else "qwen2"
        vocab = (
            add_byte_pairs(self.writer, o.vocab_size, pre)
            if o.vocab == "bpe"
            else add_pieces(self.writer, o.vocab_size)
        )
        self.put("token_embd.weight", self.normal(self.spread(), vocab, o.embedding))
        final_norm = self.norm("output_norm", o.embedding)
        if o.untied:
            self.linear("output", vocab, o.embedding, 3.0)
        if o.rope_freqs:
            self.put("rope_freqs.weight", self.random.uniform(1.0, 8.0, o.rotary // 2))
        for i in range(o.layers):
            self.block(f"blk.{i}.", recurrent=hybrid and (i + 1) % o.interval != 0)
        for i in range(o.layers, o.layers + (o.nextn if o.nextn_tensors else 0)):
            self.block(f"blk.{i}.", recurrent=False)
            self.nextn(f"blk.{i}.nextn.", vocab, final_norm)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def spread(self) -> float:
        """The standard deviation of token embeddings."""
        return 1.0 if self.o.predictive is not None else 0.2 if self.arch == "gemma3" else 0.4

    def keys(self) -> None:
        o, w, hybrid = self.o, self.writer, self.arch in HYBRID
        w.add_name(o.name or f"tiny-{self.arch}")
        w.add_block_count(o.layers + (o.nextn if o.nextn_counted else 0))
        w.add_context_length(o.context)
        w.add_embedding_length(o.embedding)
        w.add_feed_forward_length(o.feed_forward)
        w.add_head_count(o.heads)
        w.add_head_count_kv(o.kv_heads)
        w.add_layer_norm_rms_eps(o.epsilon)
        w.add_rope_freq_base(o.rope_base)
        if self.arch not in ("llama", "qwen2"):
            w.add_key_length(o.head_dim)
            w.add_value_length(o.head_dim)
        if self.arch == "llama" or hybrid:
            w.add_rope_dimension_count(o.rotary)
        if self.arch in ("qwen35", "qwen35moe"):
            w.add_rope_dimension_sections(o.sections)
        if o.rope_factor:
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(o.rope_factor)
        if o.window:
            w.add_sliding_window(o.window)
        if hybrid:
            self.hybrid_keys()
        for key, value in o.metadata.items():
            add = {int: w.add_uint32, float: w.add_float32, str: w.add_string, bool: w.add_bool, list: w.add_array}
            add[type(value)](key, value)

    def hybrid_keys(self) -> None:
        o, w = self.o, self.writer
        w.add_ssm_conv_kernel(o.conv)
        w.add_ssm_state_size(o.state)
        w.add_ssm_group_count(o.k_heads)
        w.add_ssm_time_step_rank(o.k_heads * o.v_per_k)
        w.add_ssm_inner_size(o.state * o.k_heads * o.v_per_k)
        w.add_uint32(f"{self.arch}.full_attention_interval", o.interval)
        if o.nextn and o.nextn_key:
            w.add_uint32(f"{self.arch}.nextn_predict_layers", o.nextn)
        if self.arch != "qwen35":
            w.add_expert_count(o.experts)
            w.add_expert_used_count(o.experts_used)
            w.add_expert_feed_forward_length(o.feed_forward)
            w.add_expert_shared_feed_forward_length(o.feed_forward)

    def block(self, b: str, *, recurrent: bool) -> None:
        hybrid, gemma = self.arch in HYBRID, self.arch == "gemma3"
        self.norm(f"{b}attn_norm", self.o.embedding)
        self.norm(b + ("post_attention_norm" if hybrid else "ffn_norm"), self.o.embedding)
        if gemma:
            self.norm(f"{b}post_attention_norm", self.o.embedding)
            self.norm(f"{b}post_ffw_norm", self.o.embedding)
        if recurrent:
            self.recurrent(b)
        else:
            self.attention(b)
        if self.arch in ("qwen35moe", "qwen3next"):
            self.expert_mix(b)
        else:
            self.dense(b)

    def attention(self, b: str) -> None:
        o, gates = self.o, 2 if self.arch in HYBRID else 1
        for name, width in (("q", o.heads * gates), ("k", o.kv_heads), ("v", o.kv_heads)):
            self.linear(f"{b}attn_{name}", width * o.head_dim, o.embedding)
            if self.arch == "qwen2":
                self.put(f"{b}attn_{name}.bias", self.normal(0.5, width * o.head_dim))
        self.linear(f"{b}attn_output", o.embedding, o.heads * o.head_dim, 1.5 * self.gain)
        if self.arch not in ("llama", "qwen2"):
            self.norm(f"{b}attn_q_norm", o.head_dim, 1.3)
            self.norm(f"{b}attn_k_norm", o.head_dim, 1.3)

    def recurrent(self, b: str) -> None:
        o = self.o
        v_heads = o.k_heads * o.v_per_k
        keys, values = o.k_heads * o.state, v_heads * o.state
        self.linear(f"{b}attn_qkv", 2 * keys + values, o.embedding)
        self.linear(f"{b}attn_gate", values, o.embedding)
        self.put(f"{b}ssm_conv1d.weight", self.normal(0.6, 2 * keys + values, o.conv), exact=True)
        self.put(f"{b}ssm_dt.bias", self.normal(1.0, v_heads) - 1.0)
        self.put(f"{b}ssm_a", -self.random.uniform(0.1, 2.7, v_heads))
        if self.arch == "qwen3next":
            self.linear(f"{b}ssm_ba", 2 * v_heads, o.embedding, 1.0)
        else:
            self.linear(f"{b}ssm_beta", v_heads, o.embedding, 1.0)
            self.linear(f"{b}ssm_alpha", v_heads, o.embedding, 1.0)
        self.norm(f"{b}ssm_norm", o.state)
        self.linear(f"{b}ssm_out", o.embedding, values, 1.5 * self.gain)

    def dense(self, b: str) -> None:
        self.linear(f"{b}ffn_gate", self.o.feed_forward, self.o.embedding)
        self.linear(f"{b}ffn_up", self.o.feed_forward, self.o.embedding)
        self.linear(f"{b}ffn_down", self.o.embedding, self.o.feed_forward, 1.5 * self.gain)

    def expert_mix(self, b: str) -> None:
        o = self.o
        inner, outer = 1.5 / np.sqrt(o.embedding), 1.5 * self.gain / np.sqrt(o.feed_forward)
        self.linear(f"{b}ffn_gate_inp", o.experts, o.embedding, 2.0, exact=True)
        self.put(f"{b}ffn_gate_exps.weight", self.normal(inner, o.experts, o.feed_forward, o.embedding))
        self.put(f"{b}ffn_up_exps.weight", self.normal(inner, o.experts, o.feed_forward, o.embedding))
        self.put(f"{b}ffn_down_exps.weight", self.normal(outer, o.experts, o.embedding, o.feed_forward))
        self.put(f"{b}ffn_gate_inp_shexp.weight", self.normal(1.0 / np.sqrt(o.embedding), o.embedding))
        for name in ("gate", "up"):
            self.linear(f"{b}ffn_{name}_shexp", o.feed_forward, o.embedding)
        self.linear(f"{b}ffn_down_shexp", o.embedding, o.feed_forward, 1.5 * self.gain)

    def nextn(self, b: str, vocab: int, final_norm: NDArray[Any]) -> None:
        """What makes a block an MTP head. A predictive one passes the token's embedding on, as the model does."""
        o, size = self.o, self.o.embedding
        if o.predictive is None:
            self.linear(f"{b}eh_proj", size, 2 * size, 1.4)
            self.norm(f"{b}enorm", size)
        else:
            self.projection(f"{b}eh_proj.weight", o.predictive * 0.5 / np.sqrt(size), size)
            self.put(f"{b}enorm.weight", np.ones(size))
        self.norm(f"{b}hnorm", size)
        if o.head_norm and o.predictive is None:
            self.norm(f"{b}shared_head_norm", size)
        elif o.head_norm:
            self.put(f"{b}shared_head_norm.weight", final_norm)
        if o.own_head:
            self.put(f"{b}embed_tokens.weight", self.normal(1.0, vocab, size))
            self.linear(f"{b}shared_head_head", vocab, size, 3.0)

    def projection(self, name: str, std: float, size: int) -> None:
        """Passes the embedding half of its input on, and adds a little noise."""
        weights = self.normal(std, size, 2 * size)
        weights[:, :size] += np.eye(size)
        self.put(name, weights)


def _setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as a Python literal, `true` or `false`, or else a string."""
    name, _, value = text.partition("=")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a small GGUF model with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="qwen35", choices=ARCHITECTURES)
    parser.add_argument("--type", default="F32", choices=[type.name for type in FORMATS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], type=_setting, metavar="NAME=VALUE")
    chosen = parser.parse_args(arguments)
    make(chosen.out, chosen.arch, chosen.type, chosen.seed, **dict(chosen.set))


if __name__ == "__main__":
    main()
