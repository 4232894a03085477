"""The configuration of a model, from the metadata and tensor names of its file."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dotllm.errors import ModelFileError, UnsupportedModel
from dotllm.gguf.keys import Keys
from dotllm.gguf.nextn import Blocks, count_blocks
from dotllm.gguf.reader import GGUFFile

__all__ = [
    "ARCHITECTURES",
    "ExpertConfig",
    "LayerConfig",
    "ModelConfig",
    "RecurrentConfig",
    "RopeConfig",
]

RopeStyle = Literal["neox", "adjacent"]
LayerKind = Literal["attention", "recurrent"]

HYBRID = ("qwen35", "qwen35moe", "qwen3next")
WITH_EXPERTS = ("qwen35moe", "qwen3next")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", *HYBRID)
"""What `general.architecture` may be."""

MAX_WIDTH = 1 << 24
MAX_HEADS = 1 << 16
GEMMA_PATTERN = 6  # every sixth layer is global
GEMMA_27B_BLOCKS = 62  # the one size whose attention scale is not 1 / sqrt(head_dim)

# general.file_type: what the quantiser was asked for; single tensors differ
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    21: "Q2_K_S",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    40: "Q1_0",
    41: "Q2_0",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `dimension` values of a head; `scale` multiplies positions.

    `style` "neox" pairs (j, j + dimension / 2), "adjacent" pairs (2j, 2j + 1). `sections` are those of M-RoPE, or ().
    """

    dimension: int
    base: float
    scale: float
    style: RopeStyle
    sections: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer. `window` 0 is global attention; in a recurrent layer heads, kv_heads and window are 0."""

    kind: LayerKind
    heads: int
    kv_heads: int
    feed_forward_length: int
    experts: bool
    window: int
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Gated DeltaNet layers: heads of width `state_size`.

    Value head j uses key head j // r if `interleaved`, else j % k_heads, with r = v_heads / k_heads.
    """

    state_size: int
    k_heads: int
    v_heads: int
    conv_kernel: int
    interleaved: bool

    @property
    def key_width(self) -> int:
        return self.state_size * self.k_heads

    @property
    def value_width(self) -> int:
        return self.state_size * self.v_heads

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Mixture of experts: `used` of `count` per token, and a shared expert unless its length is 0."""

    count: int
    used: int
    feed_forward_length: int
    shared_feed_forward_length: int
    weights_scale: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model but its weights. `layers` are the main layers; `mtp_note` says why `mtp` is None."""

    architecture: str
    name: str
    file_type: str
    vocab_size: int
    context_length: int
    embedding_length: int
    head_dim: int
    rms_epsilon: float
    attention_scale: float
    embedding_scale: float
    logit_softcap: float
    activation: Literal["silu", "gelu"]
    gated_attention: bool
    layers: tuple[LayerConfig, ...]
    mtp: LayerConfig | None
    mtp_note: str
    recurrent: RecurrentConfig | None
    experts: ExpertConfig | None
    tied_output: bool

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """Raises UnsupportedModel for other architectures and options, ModelFileError for values out of range."""
        architecture = _architecture(file)
        keys = Keys(file, architecture)
        gemma, hybrid = architecture == "gemma3", architecture in HYBRID
        blocks = count_blocks(file, keys, may_predict=hybrid)
        embedding = keys.integer("embedding_length", most=MAX_WIDTH)
        heads = keys.per_block("attention.head_count", blocks.total, most=MAX_HEADS)
        head_dim = _head_dim(keys, embedding, max(heads))
        layers = _layers(file, keys, architecture, blocks, heads, head_dim)
        name = file.metadata.get("general.name")
        return cls(
            architecture=architecture,
            name=name if isinstance(name, str) and name else file.path.stem,
            file_type=_file_type(file),
            vocab_size=_vocab_size(file, embedding),
            context_length=keys.integer("context_length"),
            embedding_length=embedding,
            head_dim=head_dim,
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            attention_scale=_attention_scale(architecture, blocks.main, embedding, max(heads), head_dim),
            embedding_scale=float(np.float32(math.sqrt(embedding))) if gemma else 1.0,
            logit_softcap=keys.number("final_logit_softcapping", 0.0, zero=True) if gemma else 0.0,
            activation="gelu" if gemma else "silu",
            gated_attention=hybrid,
            layers=layers[: blocks.main],
            mtp=layers[blocks.mtp] if blocks.mtp is not None else None,
            mtp_note=blocks.note,
            recurrent=_recurrent(keys, architecture) if hybrid else None,
            experts=_experts(file, keys, blocks.main) if any(layer.experts for layer in layers) else None,
            tied_output="output.weight" not in file.tensors,
        )


def _architecture(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelFileError(f"{file.path}: key general.architecture is missing; this is not a language model")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {name[:64]!r} is not supported; these are: {', '.join(ARCHITECTURES)}"
        )
    return name


def _file_type(file: GGUFFile) -> str:
    """The name of what was asked for, or else of the type that holds most values."""
    number = file.metadata.get("general.file_type")
    if type(number) is int and number in _FILE_TYPES:
        return _FILE_TYPES[number]
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.name] += math.prod(tensor.shape)
    return sizes.most_common(1)[0][0]


def _vocab_size(file: GGUFFile, embedding: int) -> int:
    shape = file.tensor("token_embd.weight").shape
    if len(shape) != 2 or shape[1] != embedding or shape[0] > MAX_WIDTH:
        raise ModelFileError(f"{file.path}: token_embd.weight has shape {shape}, expected (vocabulary, {embedding})")
    return shape[0]


def _head_dim(keys: Keys, embedding: int, heads: int) -> int:
    if heads == 0:
        raise keys.fail("attention.head_count", "is 0 in every layer")
    if keys.get("attention.key_length") is None and embedding % heads:
        raise keys.fail("attention.head_count", f"is {heads}, which does not divide the embedding length {embedding}")
    head_dim = keys.integer("attention.key_length", embedding // heads, most=MAX_WIDTH)
    value_dim = keys.integer("attention.value_length", head_dim, most=MAX_WIDTH)
    if value_dim != head_dim:
        raise UnsupportedModel(str(keys.fail("attention.value_length", f"is {value_dim}, the key length {head_dim}")))
    return head_dim


def _attention_scale(architecture: str, blocks: int, embedding: int, heads: int, head_dim: int) -> float:
    if architecture == "gemma3" and blocks == GEMMA_27B_BLOCKS:
        return 1.0 / math.sqrt(embedding // heads)
    return 1.0 / math.sqrt(head_dim)


def _layers(
    file: GGUFFile, keys: Keys, architecture: str, blocks: Blocks, heads: tuple[int, ...], head_dim: int
) -> tuple[LayerConfig, ...]:
    """All blocks in order, NextN blocks included."""
    kv_heads = keys.per_block("attention.head_count_kv", blocks.total, max(heads), most=MAX_HEADS)
    expert_blocks = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(blocks.total)]
    if any(expert_blocks) and architecture not in WITH_EXPERTS:
        raise UnsupportedModel(f"{file.path}: {architecture} with a mixture of experts is not supported")
    widths = keys.per_block("feed_forward_length", blocks.total, 0 if all(expert_blocks) else None, most=MAX_WIDTH)
    recurrent = _recurrent_blocks(keys, blocks) if architecture in HYBRID else (False,) * blocks.total
    windows = _windows(keys, architecture, blocks.total)
    rope = _rope(keys, architecture, head_dim)
    local_rope = rope
    if architecture == "gemma3":
        local_rope = RopeConfig(rope.dimension, keys.number("rope.freq_base_swa", 10000.0), 1.0, rope.style, ())
    layers = []
    for i in range(blocks.total):
        if not expert_blocks[i] and widths[i] == 0:
            raise keys.fail("feed_forward_length", f"is 0 in layer {i}")
        if recurrent[i]:
            layers.append(LayerConfig("recurrent", 0, 0, widths[i], expert_blocks[i], 0, rope))
            continue
        if not heads[i] or not kv_heads[i] or heads[i] % kv_heads[i]:
            raise keys.fail("attention.head_count_kv", f"is {kv_heads[i]} for {heads[i]} heads in layer {i}")
        own_rope = local_rope if windows[i] else rope
        layers.append(
            LayerConfig("attention", heads[i], kv_heads[i], widths[i], expert_blocks[i], windows[i], own_rope)
        )
    return tuple(layers)


def _recurrent_blocks(keys: Keys, blocks: Blocks) -> tuple[bool, ...]:
    """Main layers by the explicit list, else by the interval; a NextN block is always attention."""
    listed = keys.integers("attention.recurrent_layers", blocks.main, most=1)
    if listed is None:
        interval = keys.integer("full_attention_interval", 4)
        listed = tuple(int((i + 1) % interval != 0) for i in range(blocks.main))
    return tuple(i < blocks.main and bool(listed[i]) for i in range(blocks.total))


def _windows(keys: Keys, architecture: str, count: int) -> tuple[int, ...]:
    if architecture not in ("llama", "gemma3"):
        return (0,) * count
    window = keys.integer("attention.sliding_window", 0, least=0)
    if architecture == "llama":
        return (window,) * count
    pattern: Any = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        local = keys.integers("attention.sliding_window_pattern", count, most=1) or ()
        return tuple(window if local[i] else 0 for i in range(count))
    every = keys.integer("attention.sliding_window_pattern", GEMMA_PATTERN)
    return tuple(window if i % every < every - 1 else 0 for i in range(count))


def _rope(keys: Keys, architecture: str, head_dim: int) -> RopeConfig:
    dimension = keys.integer("rope.dimension_count", head_dim, most=head_dim)
    if dimension % 2:
        raise keys.fail("rope.dimension_count", f"is {dimension}; an even number is needed")
    sections = keys.integers("rope.dimension_sections", 4, most=MAX_WIDTH) or ()
    if sections and (len(sections) != 4 or sum(sections) == 0):
        raise keys.fail("rope.dimension_sections", f"is {sections}; four numbers are needed, not all 0")
    return RopeConfig(
        dimension=dimension,
        base=keys.number("rope.freq_base", 1e6 if architecture == "gemma3" else 1e4),
        scale=_rope_scale(keys),
        style="adjacent" if architecture == "llama" else "neox",
        sections=sections,
    )


def _rope_scale(keys: Keys) -> float:
    """1 / factor for linear scaling, which is also meant by a factor alone."""
    factor = keys.number("rope.scaling.factor", 0.0, zero=True) or keys.number("rope.scale_linear", 0.0, zero=True)
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(str(keys.fail("rope.scaling.type", f"is {kind[:64]!r}; only 'linear' is supported")))
    return 1.0 if kind == "none" or factor == 0.0 else 1.0 / factor


def _recurrent(keys: Keys, architecture: str) -> RecurrentConfig:
    config = RecurrentConfig(
        state_size=keys.integer("ssm.state_size", most=1 << 12),
        k_heads=keys.integer("ssm.group_count", most=MAX_HEADS),
        v_heads=keys.integer("ssm.time_step_rank", most=MAX_HEADS),
        conv_kernel=keys.integer("ssm.conv_kernel", least=2, most=64),
        interleaved=architecture == "qwen3next",
    )
    if config.state_size % 16:  # lanes of a kernel; there is no model of another width
        raise UnsupportedModel(str(keys.fail("ssm.state_size", f"is {config.state_size}; a multiple of 16 is needed")))
    if config.v_heads % config.k_heads:
        raise keys.fail("ssm.time_step_rank", f"is {config.v_heads}, no multiple of {config.k_heads} key heads")
    inner = keys.integer("ssm.inner_size", config.value_width)
    if inner != config.value_width:
        raise keys.fail("ssm.inner_size", f"is {inner}, but the value heads are {config.value_width} wide together")
    return config


def _experts(file: GGUFFile, keys: Keys, block: int) -> ExpertConfig:
    count = keys.integer("expert_count", most=MAX_HEADS)
    used = keys.integer("expert_used_count", most=count)
    width = max(keys.per_block("feed_forward_length", block, 0, most=MAX_WIDTH))
    shared = any(name.endswith(".ffn_gate_inp_shexp.weight") for name in file.tensors)
    return ExpertConfig(
        count=count,
        used=used,
        feed_forward_length=keys.integer("expert_feed_forward_length", width // used or None, most=MAX_WIDTH),
        shared_feed_forward_length=(
            keys.integer("expert_shared_feed_forward_length", width or None, most=MAX_WIDTH) if shared else 0
        ),
        weights_scale=keys.number("expert_weights_scale", 1.0, zero=True) or 1.0,
    )
