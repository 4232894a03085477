"""Products of rounded activations with quantised matrices: loading weights, and calling the kernel that fits.

    weight = load_weight(type, raw, experts=None)         raw (N, row bytes), or (X, N, row bytes) for experts
    x = quantize(rows, weight.activation, threads)        rows (M, K)
    matmul(weight, x, out, bias, add, threads)            out (M, N) = x W^T + bias, or += with add
    matmul_gathered(weight, x, rows, experts, out, threads)   out[p] = W[experts[p]] x[rows[p]]

A row of `out` depends on its own row of x alone: not on M, nor on the number of threads, nor on the instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dotllm.errors import UnsupportedModel
from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.types import FORMATS, GGMLType
from dotllm.kernels_cpu.decode import DECODERS
from dotllm.kernels_cpu.floats import FLOATS, float_product
from dotllm.kernels_cpu.formats import R16, repack
from dotllm.kernels_cpu.isa import choose_isa
from dotllm.kernels_cpu.naive import naive_product
from dotllm.kernels_cpu.product import interleaved_product
from dotllm.kernels_cpu.program import Command, Program, parts_for
from dotllm.kernels_cpu.quantize import float_command
from dotllm.ops.rounding import Rounded

__all__ = ["CpuWeight", "arrays_of", "every_row", "gathered", "load_weight", "matmul", "matmul_gathered", "product"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_NOTHING: F32 = np.zeros(0, np.float32)  # stands for a bias that is not there
_SEGMENT = 64  # rows of x that stay in a core's cache while the weights pass by


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A matrix (N, K) or a stack (X, N, K), in R16 (`interleaved`) or rows as in the file, and its product."""

    type: GGMLType
    shape: tuple[int, ...]
    interleaved: bool
    data: NDArray[np.uint8]
    kernel: Any = field(repr=False)

    @property
    def activation(self) -> str:
        """How activations are rounded before they meet these weights."""
        return FORMATS[self.type].activation

    @property
    def blocks(self) -> int:
        return self.shape[-1] // FORMATS[self.type].elements


def load_weight(type: GGMLType, raw: NDArray[np.uint8], *, naive: bool = False, isa: str | None = None) -> CpuWeight:
    """Weights from the rows of a file, (N, row bytes) or (X, N, row bytes); copied, interleaved where that is faster.

    `naive` keeps them as in the file. Compiles the product for this type if it is not yet in the cache.
    Raises UnsupportedModel for a type that has no product.
    """
    if type.name not in DECODERS:
        if type not in FORMATS:
            raise UnsupportedModel(f"matrices of type {type.name} are not supported: convert the file to another type")
        type, raw = GGMLType.F32, np.ascontiguousarray(dequantize(raw, type)).view(np.uint8)
    block = FORMATS[type]
    if raw.shape[-1] % block.bytes:
        raise ValueError(f"rows of {raw.shape[-1]} bytes are no whole blocks of {block.bytes} ({type.name})")
    shape = (*raw.shape[:-1], raw.shape[-1] // block.bytes * block.elements)
    interleaved = type.name in R16 and not naive
    if interleaved:
        stack = raw.reshape(-1, *raw.shape[-2:])
        layout = R16[type.name]
        groups, blocks = -(-shape[-2] // 16), shape[-1] // block.elements
        data = _aligned(len(stack) * groups * blocks * layout.block_bytes)
        parts = data.reshape(len(stack), groups, blocks, layout.block_bytes)
        for part, matrix in zip(parts, stack, strict=True):
            repack(layout, matrix, part)
        kernel = interleaved_product(type.name, isa or choose_isa())
    elif type.name in FLOATS and not naive:
        row_bytes = -(-shape[-1] // 16) * 16 * block.bytes
        data = _aligned(raw.size // raw.shape[-1] * row_bytes)
        data.reshape(-1, row_bytes)[:, : raw.shape[-1]] = raw.reshape(-1, raw.shape[-1])
        kernel = float_product(type.name)
    else:
        data = _aligned(raw.size)
        data[...] = raw.reshape(-1)
        kernel = naive_product(type.name)
    return CpuWeight(type, shape, interleaved, data, kernel)


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeroed bytes that start at a cache line."""
    buffer = np.zeros(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size]


def arrays_of(weight: CpuWeight, x: Rounded, parts: int = 1) -> tuple[tuple[NDArray[Any], ...], Command | None]:
    """The four flat arrays that the kernel of this weight reads, and what must run before they hold anything."""
    if x.kind != weight.activation or x.columns != weight.shape[-1]:
        raise ValueError(
            f"weights {weight.type.name} {weight.shape} need {weight.activation} rows of {weight.shape[-1]}, "
            f"not {x.kind} rows of {x.columns}"
        )
    if weight.interleaved:
        return tuple(array.reshape(-1) for array in (x.values, x.scales, x.sums, x.offsets)), None
    if x.kind == "F32":
        return _as_floats(x.values, _NOTHING), None
    rows, error_columns = len(x.values), x.offsets.shape[1] if x.kind == "Q8_1" else 0
    out = np.zeros((rows, -(-x.columns // 16) * 16), np.float32)
    error = np.zeros((rows, error_columns), np.float32)
    return _as_floats(out, error), float_command(x, out, error, parts)


def _as_floats(values: F32, error: F32) -> tuple[NDArray[Any], ...]:
    return np.zeros(0, np.int8), values.reshape(-1), np.zeros(0, np.int32), error.reshape(-1)


def product(
    weight: CpuWeight, arrays: tuple[NDArray[Any], ...], work: tuple[I32, ...], out: F32, bias: F32 | None, add: bool,
    parts: int,
) -> Command:  # fmt: skip
    """The call of the weight's kernel for `work`, as `product` describes it."""
    if not out.flags.c_contiguous:
        raise ValueError("out must be contiguous")
    width = weight.shape[-2]
    arguments = (
        weight.data, weight.blocks, arrays, work, out.reshape(-1), width, _NOTHING if bias is None else bias, add
    )  # fmt: skip
    return Command(weight.kernel, arguments, parts)


def matmul(weight: CpuWeight, x: Rounded, out: F32, bias: F32 | None, add: bool, threads: int) -> None:
    """out (M, N) = x (M, K) times the transposed weight (N, K), plus bias (N,), plus what is in out with `add`."""
    rows = len(x.values)
    if out.shape != (rows, weight.shape[-2]) or (bias is not None and bias.shape != (weight.shape[-2],)):
        raise ValueError(f"out {out.shape} or bias does not fit {rows} rows times weights {weight.shape}")
    arrays, before = arrays_of(weight, x)
    groups = [[before]] if before else []
    Program(
        [*groups, [product(weight, arrays, every_row(rows), out, bias, add, parts_for(out.size * x.columns, threads))]]
    ).run(threads)


@lru_cache(maxsize=64)
def every_row(rows: int) -> tuple[I32, ...]:
    """The work of a plain product, made once for each number of rows: kernels only read it."""
    starts = np.append(np.arange(0, rows, _SEGMENT, dtype=np.int32), np.int32(rows))
    index = np.arange(rows, dtype=np.int32)
    return starts, np.zeros(len(starts) - 1, np.int32), index, index


def gathered(rows: I32, experts: I32, count: int) -> tuple[tuple[I32, ...], Command]:
    """The work of pairs of a row and one of `count` experts, grouped by expert, and the command that groups them."""
    pairs = len(rows)
    segments = min(pairs, count)
    sizes = (segments + 1, segments, pairs, pairs)
    work = tuple(np.zeros(size, np.int32) for size in sizes)
    return work, Command(group_part, (rows, experts, np.zeros(count + 1, np.int32), *work), 1)


def matmul_gathered(weight: CpuWeight, x: Rounded, rows: I32, experts: I32, out: F32, threads: int) -> None:
    """out[p] (N,) = weight[experts[p]] (N, K) times row rows[p] of x; reads the experts that occur only.

    Raises ValueError if an index lies outside x or the stack.
    """
    if out.shape != (len(rows), weight.shape[-2]) or experts.shape != rows.shape or len(weight.shape) != 3:
        raise ValueError(f"out {out.shape} does not fit {len(rows)} pairs of a row and an expert of {weight.shape}")
    if len(rows) == 0:
        return
    if rows.min() < 0 or rows.max() >= len(x.values) or experts.min() < 0 or experts.max() >= weight.shape[0]:
        raise ValueError(f"a row or expert lies outside {len(x.values)} rows and {weight.shape[0]} experts")
    arrays, before = arrays_of(weight, x)
    work, group = gathered(rows, experts, weight.shape[0])
    first = [group, before] if before else [group]
    Program([first, [product(weight, arrays, work, out, None, False, parts_for(out.size * x.columns, threads))]]).run(
        threads
    )


@njit(cache=True)
def group_part(
    rows: Any, experts: Any, ends: Any, starts: Any, chosen: Any, sources: Any, targets: Any, part: int, parts: int
) -> None:  # fmt: skip
    # rows, experts (P,): what each pair meets; ends (X + 1,) scratch. Segments come in order of expert, pairs within
    # one in their own order; segments that are left over are empty. The whole is one part.
    ends[:] = 0
    for pair in range(rows.size):
        ends[experts[pair] + 1] += 1
    segment = 0
    for expert in range(ends.size - 1):
        if ends[expert + 1] > 0:
            chosen[segment], starts[segment] = expert, ends[expert]
            segment += 1
        ends[expert + 1] += ends[expert]
    for pair in range(rows.size):
        at = ends[experts[pair]]
        sources[at], targets[at] = rows[pair], pair
        ends[experts[pair]] = at + 1
    starts[segment:] = rows.size
