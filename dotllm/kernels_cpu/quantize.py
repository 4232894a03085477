"""Rounding activations for products with quantised weights; the formulas and the layout are those of `ops.rounding`.

A row is cut in blocks of 32 or 256 values; a block's peak, scale and sums are found sixteen lanes at a time:

    x, one row   | 32 values, d | 32 values, d | ...          values, scales, sums, offsets: one flat array each
                 | v0      | v1      |                        peak = peak16(max(|v0|, |v1|))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from dotllm.kernels_cpu.lanes import (
    absolute,
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
from dotllm.ops.rounding import Rounded, empty_rounded

__all__ = ["quantize", "quantize_into"]


@njit(cache=True)
def _store_rounded(values: Any, at: int, v: Any, inverse: Any) -> Any:
    """values[at + i] = rint(v[i] * inverse[i]) within -127 .. 127; returns the sum of the sixteen."""
    limit = like(v, 127.0)
    q = max16(min16(rint(v * inverse), limit), zero16() - limit)
    store16_int8(values, at, q)
    return sum16(q)


@njit(cache=True)
def _round_32(x: Any, values: Any, scales: Any, sums: Any, offsets: Any, start: int, stop: int) -> None:
    # x f32, values i8: flat (M * K,); scales f32, sums i32, offsets f32: flat (M * K / 32,)
    for b in range(start, stop):
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
def _round_256(x: Any, values: Any, scales: Any, sums: Any, start: int, stop: int) -> None:
    # x f32, values i8: flat (M * K,); scales f32 (M * K / 256,); sums i32 (M * K / 16,)
    zero, infinity = np.float32(0.0), np.float32(np.inf)
    for b in range(start, stop):
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


@njit(cache=True, parallel=True)
def _round_32_threaded(x: Any, values: Any, scales: Any, sums: Any, offsets: Any, threads: int) -> None:
    for thread in prange(threads):
        start, stop = scales.size * thread // threads, scales.size * (thread + 1) // threads
        _round_32(x, values, scales, sums, offsets, start, stop)


@njit(cache=True, parallel=True)
def _round_256_threaded(x: Any, values: Any, scales: Any, sums: Any, threads: int) -> None:
    for thread in prange(threads):
        start, stop = scales.size * thread // threads, scales.size * (thread + 1) // threads
        _round_256(x, values, scales, sums, start, stop)


@njit(cache=True)
def _to_halves(x: Any, columns: int, padded: int, out: Any, brain: bool) -> None:
    # x f32 flat (M * columns,), out u16 flat (M * padded,): float16 bits, or bfloat16 bits if `brain`
    for i in range(x.size):
        to = i // columns * padded + i % columns
        out[to] = float_to_bfloat(x[i]) if brain else float_to_half(x[i])


def quantize_into(x: NDArray[np.float32], rounded: Rounded, threads: int) -> None:
    """Round the rows of x (M, K), contiguous, into buffers from `empty_rounded(kind, M, K)` on `threads` threads."""
    if x.shape != (len(rounded.values), rounded.columns):
        raise ValueError(f"rows of shape {x.shape} do not fit buffers of {len(rounded.values)} x {rounded.columns}")
    flat, values, scales, sums, offsets = (
        array.reshape(-1) for array in (x, rounded.values, rounded.scales, rounded.sums, rounded.offsets)
    )
    threads = min(threads, x.size // 32768)  # starting threads for less costs more than it saves
    if rounded.kind in ("Q8_0", "Q8_1"):
        if threads > 1:
            _round_32_threaded(flat, values, scales, sums, offsets, threads)
        else:
            _round_32(flat, values, scales, sums, offsets, 0, scales.size)
    elif rounded.kind == "Q8_K":
        if threads > 1:
            _round_256_threaded(flat, values, scales, sums, threads)
        else:
            _round_256(flat, values, scales, sums, 0, scales.size)
    elif rounded.kind == "F32":
        rounded.values[:, : rounded.columns] = x
    else:
        _to_halves(flat, rounded.columns, rounded.values.shape[1], values, rounded.kind == "BF16")


def quantize(x: NDArray[np.float32], kind: str, threads: int) -> Rounded:
    """The rows of x (M, K) rounded as `kind` asks, in new buffers."""
    rounded = empty_rounded(kind, *x.shape)
    quantize_into(x, rounded, threads)
    return rounded
