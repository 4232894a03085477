"""Rounding activations for products with quantised weights; the formulas and the layout are those of `ops.rounding`.

A row is cut in blocks of 32 or 256 values; a block's peak, scale and sums are found sixteen lanes at a time:

    x, one row   | 32 values, d | 32 values, d | ...          values, scales, sums, offsets: one flat array each
                 | v0      | v1      |                        peak = peak16(max(|v0|, |v1|))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dotllm.kernels_cpu.lanes import (
    absolute,
    bfloat_to_float,
    div,
    float_to_bfloat,
    float_to_half,
    half_to_float,
    like,
    load16,
    max16,
    min16,
    peak16,
    rint,
    splat16,
    store16_int8,
    sum16,
    where_less,
    zero16,
)
from dotllm.kernels_cpu.program import Command, Program
from dotllm.ops.rounding import Rounded, empty_rounded

__all__ = ["float_command", "quantize", "quantize_command"]


@njit(cache=True)
def _store_rounded(values: Any, at: int, v: Any, inverse: Any) -> Any:
    """values[at + i] = rint(v[i] * inverse[i]) within -127 .. 127; returns the sum of the sixteen."""
    limit = like(v, 127.0)
    q = max16(min16(rint(v * inverse), limit), zero16() - limit)
    store16_int8(values, at, q)
    return sum16(q)


@njit(cache=True)
def round_32_part(
    x: Any, values: Any, scales: Any, sums: Any, offsets: Any, thread: int, n_threads: int
) -> None:  # fmt: skip
    # x f32, values i8: flat (M * K,); scales f32, sums i32, offsets f32: flat (M * K / 32,)
    for b in range(scales.size * thread // n_threads, scales.size * (thread + 1) // n_threads):
        low, high = load16(x, 32 * b), load16(x, 32 * b + 16)
        peak = peak16(max16(absolute(low), max16(absolute(high), zero16())))
        inverse = div(np.float32(127.0), peak)
        usable = where_less(inverse, np.float32(np.inf), inverse, np.float32(0.0))  # 0 where peak is 0 or tiny
        factor = splat16(usable)
        total = _store_rounded(values, 32 * b, low, factor) + _store_rounded(values, 32 * b + 16, high, factor)
        d = div(peak, np.float32(127.0))
        scales[b] = half_to_float(float_to_half(d))
        sums[b] = np.int32(total)
        offsets[b] = half_to_float(float_to_half(d * total))


@njit(cache=True)
def round_256_part(x: Any, values: Any, scales: Any, sums: Any, thread: int, n_threads: int) -> None:
    # x f32, values i8: flat (M * K,); scales f32 (M * K / 256,); sums i32 (M * K / 16,)
    zero, infinity = np.float32(0.0), np.float32(np.inf)
    for b in range(scales.size * thread // n_threads, scales.size * (thread + 1) // n_threads):
        size = zero16()
        for i in range(256 * b, 256 * b + 256, 16):
            size = max16(absolute(load16(x, i)), size)
        peak = peak16(size)
        first = 256 * b
        while first < 256 * b + 255 and absolute(x[first]) != peak:  # the first of that magnitude gives the sign
            first += 1
        signed = where_less(x[first], zero, zero - peak, peak)
        inverse = div(np.float32(-127.0), signed)
        usable = where_less(absolute(inverse), infinity, inverse, zero)
        factor = splat16(usable)
        for i in range(16 * b, 16 * b + 16):
            sums[i] = np.int32(_store_rounded(values, 16 * i, load16(x, 16 * i), factor))
        scale = div(np.float32(1.0), usable)
        scales[b] = where_less(absolute(scale), infinity, scale, where_less(peak, infinity, zero, signed))


@njit(cache=True)
def to_halves_part(x: Any, columns: int, out: Any, brain: bool, thread: int, n_threads: int) -> None:
    # x f32 flat (M * columns,), out u16 (M, padded): float16 bits, or bfloat16 bits if `brain`
    rows = out.shape[0]
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        for i in range(columns):
            value = x[row * columns + i]
            out[row, i] = float_to_bfloat(value) if brain else float_to_half(value)


@njit(cache=True)
def pad_part(x: Any, columns: int, out: Any, thread: int, n_threads: int) -> None:
    # x f32 flat (M * columns,), out f32 (M, padded)
    rows = out.shape[0]
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        for i in range(columns):
            out[row, i] = x[row * columns + i]


@njit(cache=True)
def from_halves_part(values: Any, out: Any, brain: bool, thread: int, n_threads: int) -> None:
    # values u16 flat, out f32 flat
    for i in range(out.size * thread // n_threads, out.size * (thread + 1) // n_threads):
        out[i] = bfloat_to_float(values[i]) if brain else half_to_float(values[i])


@njit(cache=True)
def from_blocks_part(
    values: Any, scales: Any, sums: Any, offsets: Any, out: Any, error: Any, thread: int, n_threads: int
) -> None:  # fmt: skip
    # values i8 (M, K), scales f32 (M, K / block), sums i32, offsets f32 (M, ..); out f32 (M, padded): the rounded rows;
    # error f32 (M, K / block) or (M, 0): how far the offsets lie from the sums of the rounded values
    rows, columns = values.shape
    block = columns // scales.shape[1]
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        for i in range(columns):
            out[row, i] = np.float32(values[row, i]) * scales[row, i // block]
        for b in range(error.shape[1]):
            error[row, b] = offsets[row, b] - scales[row, b] * np.float32(sums[row, b])


def quantize_command(x: NDArray[np.float32], rounded: Rounded, parts: int) -> Command:
    """Round the rows of x (M, K), contiguous, into buffers from `empty_rounded(kind, M, K)`."""
    if x.shape != (len(rounded.values), rounded.columns):
        raise ValueError(f"rows of shape {x.shape} do not fit buffers of {len(rounded.values)} x {rounded.columns}")
    flat, values, scales, sums, offsets = (
        array.reshape(-1) for array in (x, rounded.values, rounded.scales, rounded.sums, rounded.offsets)
    )
    if rounded.kind in ("Q8_0", "Q8_1"):
        return Command(round_32_part, (flat, values, scales, sums, offsets), parts)
    if rounded.kind == "Q8_K":
        return Command(round_256_part, (flat, values, scales, sums), parts)
    if rounded.kind == "F32":
        return Command(pad_part, (flat, rounded.columns, rounded.values), parts)
    return Command(to_halves_part, (flat, rounded.columns, rounded.values, rounded.kind == "BF16"), parts)


def float_command(rounded: Rounded, out: NDArray[np.float32], error: NDArray[np.float32], parts: int) -> Command:
    """Write the rounded rows as floats: out (M, K to the next multiple of 16, zeros behind).

    error (M, K / 32) receives `Rounded.sum_error`; it may be (M, 0) where nobody asks for it.
    """
    if rounded.kind in ("F16", "BF16"):
        arguments = (rounded.values.reshape(-1), out.reshape(-1), rounded.kind == "BF16")
        return Command(from_halves_part, arguments, parts)
    return Command(from_blocks_part, (rounded.values, rounded.scales, rounded.sums, rounded.offsets, out, error), parts)


def quantize(x: NDArray[np.float32], kind: str, threads: int) -> Rounded:
    """The rows of x (M, K) rounded as `kind` asks, in new buffers."""
    rounded = empty_rounded(kind, *x.shape)
    Program([[quantize_command(x, rounded, threads)]]).run(threads)
    return rounded
