"""Write models of real sizes with random weights, to measure speed without anyone's weights.

    python tools/make_synthetic.py --shape qwen3.5-0.8b --quant q4_k_m [--layers N] [--predictive A | --no-mtp] OUT.gguf

Shapes, vocabulary size, MTP head and the mix of tensor types are those of real files. The weights are random quantised
blocks, not quantised numbers: a slab of them for each type, which every tensor reads from another start, goes straight
to the disk. Scales keep activations near 1, so that logits are finite and spread by a few units; the text is noise.
`--predictive 0.02` makes an MTP head that is often right; the output matrix is then never tied.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from gguf.gguf_writer import TensorInfo
from make_tiny_gguf import HYBRID, ModelWriter, Options
from quantize import quantize

from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.types import FORMATS, GGMLType

__all__ = ["QUANTS", "SHAPES", "make"]

SLAB_BLOCKS = 262147
"""Prime, and more than any vocabulary has rows: no two rows of a matrix begin at the same block."""

_QWEN = Options(
    interval=4,
    head_dim=256,
    rotary=64,
    sections=(11, 11, 10, 0),
    state=128,
    k_heads=16,
    context=262144,
    vocab_size=248320,
)


def _qwen(layers: int, embedding: int, feed_forward: int, heads: int, kv_heads: int, **more: Any) -> Options:
    sizes: dict[str, Any] = {"layers": layers, "embedding": embedding, "feed_forward": feed_forward}
    return dataclasses.replace(_QWEN, **sizes, heads=heads, kv_heads=kv_heads, **more)


SHAPES: Mapping[str, tuple[str, Options]] = MappingProxyType(
    {
        "qwen3.5-0.8b": ("qwen35", _qwen(24, 1024, 3584, 8, 2, v_per_k=1)),
        "qwen3.5-4b": ("qwen35", _qwen(32, 2560, 9216, 16, 4, v_per_k=2)),
        "qwen3.5-9b": ("qwen35", _qwen(32, 4096, 12288, 16, 4, v_per_k=2, untied=True)),
        "qwen3.5-27b": ("qwen35", _qwen(64, 5120, 17408, 24, 4, v_per_k=3, untied=True)),
        "qwen3.5-35b-a3b": (
            "qwen35moe",
            _qwen(40, 2048, 512, 16, 2, v_per_k=2, untied=True, experts=256, experts_used=8),
        ),
        "llama-1b": (
            "llama",
            Options(
                layers=16,
                embedding=2048,
                feed_forward=8192,
                heads=32,
                kv_heads=8,
                head_dim=64,
                rotary=64,
                rope_base=5e5,
                epsilon=1e-5,
                context=131072,
                vocab_size=128256,
                nextn=0,
            ),
        ),
    }
)
"""Name: architecture and sizes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quant:
    """The types of a file: most matrices, and the one that gives the logits; `mixed` raises those that matter more."""

    most: GGMLType
    output: GGMLType
    file_type: int
    mixed: bool = False


QUANTS: Mapping[str, Quant] = MappingProxyType(
    {
        "q4_k_m": Quant(GGMLType.Q4_K, GGMLType.Q6_K, 15, mixed=True),
        "q6_k": Quant(GGMLType.Q6_K, GGMLType.Q6_K, 18),
        "q8_0": Quant(GGMLType.Q8_0, GGMLType.Q8_0, 7),
        "q4_0": Quant(GGMLType.Q4_0, GGMLType.Q6_K, 2),
    }
)


def make(path: str | Path, shape: str, quant: str = "q4_k_m", seed: int = 0, **options: Any) -> Path:
    """Write a model to `path`; `options` are fields of `make_tiny_gguf.Options` in place of the shape's own."""
    if shape not in SHAPES or quant not in QUANTS:
        raise ValueError(f"{shape!r}, {quant!r}: one of {', '.join(SHAPES)} and one of {', '.join(QUANTS)} are needed")
    arch, sizes = SHAPES[shape]
    metadata = {"general.file_type": QUANTS[quant].file_type}
    chosen = dataclasses.replace(sizes, **{"name": f"synthetic-{shape}", "metadata": metadata, **options})
    if chosen.predictive is not None:
        chosen = dataclasses.replace(chosen, untied=True)  # as in tiny models: a tied one would repeat its last token
    _Writer(Path(path), arch, QUANTS[quant], seed, chosen).write()
    return Path(path)


# ---- random blocks ---------------------------------------------------------------------------------------------------
# Where a block has its scale, where that of its minima, and the minimum, in steps, that centres values on 0.
_SCALES: Mapping[GGMLType, tuple[int, int | None, float]] = MappingProxyType(
    {
        GGMLType.Q4_0: (0, None, 0.0),
        GGMLType.Q8_0: (0, None, 0.0),
        GGMLType.Q4_K: (0, 2, 7.5),
        GGMLType.Q5_K: (0, 2, 15.5),
        GGMLType.Q6_K: (208, None, 0.0),
    }
)


class _Slab:
    """A ring of random blocks of one type, all values with a mean near 0 and a standard deviation that can be set."""

    def __init__(self, type: GGMLType, generator: np.random.Generator) -> None:
        self.type = type
        self.blocks = generator.integers(0, 256, (SLAB_BLOCKS, FORMATS[type].bytes), np.uint8)
        if type in (GGMLType.Q4_K, GGMLType.Q5_K):  # scale and minimum of a sub-block are the same 6-bit number
            parts = generator.integers(8, 16, (SLAB_BLOCKS, 8), np.uint8)
            self.blocks[:, 4:8] = self.blocks[:, 8:12] = parts[:, :4]
            self.blocks[:, 12:16] = parts[:, 4:] | parts[:, 4:] << 4
        elif type is GGMLType.Q6_K:
            self.blocks[:, 192:208] = generator.integers(8, 16, (SLAB_BLOCKS, 16), np.uint8)
        self._scales = generator.uniform(0.7, 1.3, SLAB_BLOCKS).astype(np.float32)
        self._std = 0.0
        self.spread(1e-2)
        self._scales *= np.float32(1e-2 / dequantize(self.blocks[:4096], type).std())
        self._std = 0.0

    def spread(self, std: float) -> None:
        """Give all values the standard deviation `std`."""
        if std == self._std:
            return
        at, minimum, steps = _SCALES[self.type]
        scales = (self._scales * np.float32(std)).astype("<f2")
        self.blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        if minimum is not None:
            lows = (scales.astype(np.float32) * np.float32(steps)).astype("<f2")
            self.blocks[:, minimum : minimum + 2] = lows.view(np.uint8).reshape(-1, 2)
        self._std = std


@dataclasses.dataclass(frozen=True, slots=True)
class _Spread:
    """A matrix that has no values yet: normal numbers (*shape), or blocks that look like them."""

    std: float
    shape: tuple[int, ...]
    ndim: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Stream:
    """A tensor's bytes, made while they are written: what the writer wants of an array."""

    slab: _Slab
    std: float
    start: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * FORMATS[self.slab.type].bytes

    def tofile(self, file: IO[bytes]) -> None:
        self.slab.spread(self.std)
        at, left = self.start, self.count
        while left:
            piece = self.slab.blocks[at : at + left]
            file.write(piece.data)
            at, left = 0, left - len(piece)


# ---- the file --------------------------------------------------------------------------------------------------------
class _Writer(ModelWriter):
    """The tensors of the tiny models at full size; matrices are streamed."""

    def __init__(self, path: Path, arch: str, quant: Quant, seed: int, options: Options) -> None:
        super().__init__(path, arch, quant.most, seed, options)
        self.quant = quant
        self.generator = np.random.default_rng(seed)
        self.slabs: dict[GGMLType, _Slab] = {}

    def normal(self, std: float, *shape: int) -> Any:
        return super().normal(std, *shape) if len(shape) == 1 else _Spread(float(std), shape)

    def spread(self) -> float:
        """A tied matrix gives the logits too, which should spread by 3."""
        return super().spread() if self.o.untied else 3.0 / math.sqrt(self.o.embedding)

    def put(self, name: str, values: Any, *, exact: bool = False) -> None:
        if not isinstance(values, _Spread):
            super().put(name, values, exact=exact)
        elif exact:
            super().put(name, super().normal(values.std, *values.shape), exact=True)
        else:
            type = self.type_of(name)
            slab, start, count = self.place(type, values.shape)
            stream = _Stream(slab, values.std, start, count)
            self.writer.tensors[-1][name] = TensorInfo(values.shape, type, stream.nbytes, stream)

    def projection(self, name: str, std: float, size: int) -> None:
        type, shape = self.type_of(name), (size, 2 * size)
        slab, start, count = self.place(type, shape)
        slab.spread(std)
        blocks = slab.blocks.take(np.arange(start, start + count), 0, mode="wrap")
        blocks = blocks.reshape(size, -1, FORMATS[type].bytes)
        rows, width = np.arange(size), FORMATS[type].elements
        blocks[rows, rows // width] = quantize(np.eye(width), type)[rows % width]
        self.writer.tensors[-1][name] = TensorInfo(shape, type, blocks.nbytes, blocks)

    def place(self, type: GGMLType, shape: tuple[int, ...]) -> tuple[_Slab, int, int]:
        """The slab of a type, a start in it, and the number of blocks of a tensor."""
        if shape[-1] % FORMATS[type].elements:
            raise ValueError(f"rows of {shape[-1]} values do not divide into {type.name} blocks")
        if type not in self.slabs:
            self.slabs[type] = _Slab(type, self.generator)
        start = int(self.generator.integers(SLAB_BLOCKS))
        return self.slabs[type], start, math.prod(shape) // FORMATS[type].elements

    def type_of(self, name: str) -> GGMLType:
        """The type that llama.cpp's quantiser gives a matrix, by rule of thumb."""
        parts = name.split(".")
        tensor = parts[-2]
        if name == "output.weight" or (name == "token_embd.weight" and not self.o.untied):
            return self.quant.output
        if tensor in ("ssm_alpha", "ssm_beta"):  # small, and they steer the decay of the state
            return GGMLType.Q8_0
        if not self.quant.mixed:
            return self.quant.most
        if tensor == "attn_qkv":
            return GGMLType.Q5_K
        if tensor == "attn_v" or tensor.startswith("ffn_down"):
            step = self.o.interval if tensor == "attn_v" and self.arch in HYBRID else 1
            index, count = int(parts[1]) // step, self.o.layers // step + self.o.nextn
            return GGMLType.Q6_K if _raised(index, count) else self.quant.most
        return self.quant.most


def _raised(index: int, count: int) -> bool:
    """Is it in the first or last eighth, or one of every three between?"""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF model of a real size with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--quant", default="q4_k_m", choices=QUANTS)
    parser.add_argument("--layers", type=int, help="main layers, in place of the shape's")
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--predictive", type=float, metavar="A", help="scale residual branches; the MTP head mimics")
    heads.add_argument("--no-mtp", dest="nextn", action="store_const", const=0, help="no MTP head, for engines without")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    options = {name: getattr(chosen, name) for name in ("layers", "predictive", "nextn")}
    given = {name: value for name, value in options.items() if value is not None}
    make(chosen.out, chosen.shape, chosen.quant, chosen.seed, **given)


if __name__ == "__main__":
    main()
