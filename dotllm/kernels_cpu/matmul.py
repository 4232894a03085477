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
from numpy.typing import NDArray

from dotllm.errors import UnsupportedModel
from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.types import FORMATS, GGMLType
from dotllm.kernels_cpu.decode import DECODERS
from dotllm.kernels_cpu.floats import FLOATS, float_product
from dotllm.kernels_cpu.formats import R16, repack
from dotllm.kernels_cpu.isa import choose_isa
from dotllm.kernels_cpu.naive import naive_product
from dotllm.kernels_cpu.product import address_of, interleaved_product, launch
from dotllm.ops.rounding import Rounded

__all__ = ["CpuWeight", "load_weight", "matmul", "matmul_gathered"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_NOTHING: F32 = np.zeros(0, np.float32)  # stands for a bias that is not there
_SEGMENT = 64  # rows of x that stay in a core's cache while the weights pass by
_SERIAL = 1 << 17  # products of fewer weights than this are done before a second thread has started


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A matrix (N, K) or a stack (X, N, K), in R16 (`interleaved`) or rows as in the file, and its compiled product."""

    type: GGMLType
    shape: tuple[int, ...]
    interleaved: bool
    data: NDArray[np.uint8]
    kernel: Any = field(repr=False)
    address: Any = field(repr=False)

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
    return CpuWeight(type, shape, interleaved, data, kernel, address_of(kernel))


def _aligned(size: int) -> NDArray[np.uint8]:
    """Zeroed bytes that start at a cache line."""
    buffer = np.zeros(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size]


def _activations(weight: CpuWeight, x: Rounded) -> tuple[NDArray[Any], ...]:
    """The four flat arrays that the kernel of this weight reads."""
    if x.kind != weight.activation or x.columns != weight.shape[-1]:
        raise ValueError(
            f"weights {weight.type.name} {weight.shape} need {weight.activation} rows of {weight.shape[-1]}, "
            f"not {x.kind} rows of {x.columns}"
        )
    if weight.interleaved:
        return tuple(array.reshape(-1) for array in (x.values, x.scales, x.sums, x.offsets))
    values = x.dequantized()
    padded = np.zeros((len(values), -(-x.columns // 16) * 16), np.float32)
    padded[:, : x.columns] = values
    error = x.sum_error() if x.kind == "Q8_1" else np.zeros((0, 0), np.float32)
    return np.zeros(0, np.int8), padded.reshape(-1), np.zeros(0, np.int32), error.reshape(-1)


def _run(weight: CpuWeight, x: Rounded, work: tuple[I32, ...], out: F32, bias: F32, add: bool, threads: int) -> None:
    arrays, width, pairs = _activations(weight, x), weight.shape[-2], len(work[2])
    if not out.flags.c_contiguous:
        raise ValueError("out must be contiguous")
    flat = out.reshape(-1)
    threads = min(threads, pairs * width * weight.shape[-1] // _SERIAL)
    if threads > 1:
        launch(weight.address, weight.data, weight.blocks, arrays, work, flat, width, bias, add, threads)
    else:
        items = (len(work[0]) - 1) * -(-width // 16)
        weight.kernel(weight.data, weight.blocks, arrays, work, flat, width, bias, add, 0, items)


def matmul(weight: CpuWeight, x: Rounded, out: F32, bias: F32 | None, add: bool, threads: int) -> None:
    """out (M, N) = x (M, K) times the transposed weight (N, K), plus bias (N,), plus what is in out with `add`."""
    rows = len(x.values)
    if out.shape != (rows, weight.shape[-2]) or (bias is not None and bias.shape != (weight.shape[-2],)):
        raise ValueError(f"out {out.shape} or bias does not fit {rows} rows times weights {weight.shape}")
    _run(weight, x, _every_row(rows), out, _NOTHING if bias is None else bias, add, threads)


@lru_cache(maxsize=64)
def _every_row(rows: int) -> tuple[I32, ...]:
    """The work of a plain product, made once for each number of rows: kernels only read it."""
    starts = np.append(np.arange(0, rows, _SEGMENT, dtype=np.int32), np.int32(rows))
    index = np.arange(rows, dtype=np.int32)
    return starts, np.zeros(len(starts) - 1, np.int32), index, index


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
    order = np.argsort(experts, kind="stable").astype(np.int32)
    chosen = experts[order]
    new = np.flatnonzero(np.diff(chosen, prepend=np.int32(-1)))
    starts = np.append(new, len(rows)).astype(np.int32)
    work = (starts, chosen[new].astype(np.int32), rows[order].astype(np.int32), order)
    _run(weight, x, work, out, _NOTHING, False, threads)
