"""Activations rounded as ggml's CPU code rounds them before a product with quantised weights.

    Q8_0   blocks of 32:  d = max |x| / 127,  q = rint(x * (127 / max |x|));  d is kept as float16 keeps it
    Q8_1   the same, and for each block the offset float16(d * sum(q)), which multiplies the weights' minimum
    Q8_K   blocks of 256: i = -127 / (the x of largest magnitude),  q = rint(i * x),  d = 1 / i in float32
    F16, BF16, F32        the nearest such number

`kernels_cpu.quantize` computes the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dotllm.ops.float32 import bfloat_to_float, div, float_to_bfloat, float_to_half, half_to_float

__all__ = ["BLOCK", "Rounded", "empty_rounded", "quantize_rows"]

F32 = NDArray[np.float32]

BLOCK = {"Q8_0": 32, "Q8_1": 32, "Q8_K": 256}
"""Values that share a scale, for the kinds that have scales."""

_SUM_BLOCK = {"Q8_0": 32, "Q8_1": 32, "Q8_K": 16}


@dataclass(frozen=True, slots=True)
class Rounded:
    """M rows of K rounded values.

    values   (M, K) int8 for the Q8 kinds; (M, K to the next multiple of 16, zeros behind) uint16 bits or float32 else
    scales   (M, K / block) float32: value = scale * q                              (empty for the float kinds)
    sums     (M, K / 32) int32 sums of q; Q8_K: (M, K / 16)                         (empty for the float kinds)
    offsets  (M, K / 32) float32: d * sum(q) rounded to float16                     (Q8_0 and Q8_1, else empty)
    """

    kind: str
    columns: int
    values: NDArray[Any]
    scales: F32
    sums: NDArray[np.int32]
    offsets: F32

    def dequantized(self) -> F32:
        """The rounded values as float32, (M, K)."""
        if self.kind == "F32":
            return cast(F32, self.values[:, : self.columns])
        if self.kind in ("F16", "BF16"):
            convert = half_to_float if self.kind == "F16" else bfloat_to_float
            return cast(F32, convert(self.values[:, : self.columns]))
        with np.errstate(invalid="ignore"):
            return self.values.astype(np.float32) * np.repeat(self.scales, BLOCK[self.kind], axis=1)

    def sum_error(self) -> F32:
        """offsets - scales * sums: how far the rounded block sums of Q8_1 lie from the sums of the rounded values."""
        with np.errstate(invalid="ignore"):
            return self.offsets - self.scales * self.sums.astype(np.float32)


def empty_rounded(kind: str, rows: int, columns: int) -> Rounded:
    """Buffers for `rows` rounded rows of `columns` values; padding is zeroed, the rest undefined."""
    if kind not in BLOCK:
        dtype = np.float32 if kind == "F32" else np.uint16
        nothing = np.empty((rows, 0), np.float32)
        values: NDArray[Any] = np.zeros((rows, -(-columns // 16) * 16), dtype)
        return Rounded(kind, columns, values, nothing, np.empty((rows, 0), np.int32), nothing)
    offsets = 0 if kind == "Q8_K" else columns // 32
    return Rounded(
        kind,
        columns,
        np.empty((rows, columns), np.int8),
        np.empty((rows, columns // BLOCK[kind]), np.float32),
        np.empty((rows, columns // _SUM_BLOCK[kind]), np.int32),
        np.empty((rows, offsets), np.float32),
    )


def quantize_rows(x: F32, kind: str) -> Rounded:
    """Round the rows of x (M, K); for the Q8 kinds K is a multiple of the block."""
    rounded = empty_rounded(kind, *x.shape)
    if kind in ("Q8_0", "Q8_1"):
        _round_32(x, rounded)
    elif kind == "Q8_K":
        _round_256(x, rounded)
    else:
        target = rounded.values[:, : x.shape[1]]
        target[...] = {"F16": float_to_half, "BF16": float_to_bfloat}.get(kind, np.asarray)(x)
    return rounded


def _to_int8(blocks: F32, inverse: F32) -> NDArray[np.int8]:
    """rint(blocks * inverse) within -127 .. 127; NaN becomes 127. A block whose inverse overflows becomes zeros."""
    with np.errstate(all="ignore"):
        v = np.rint(blocks * np.where(np.isfinite(inverse), inverse, np.float32(0))[..., None])
        v = np.where(v < 127, v, np.float32(127))
        return np.where(v > -127, v, np.float32(-127)).astype(np.int8)


def _round_32(x: F32, out: Rounded) -> None:
    blocks = x.reshape(len(x), -1, 32)
    peak = np.fmax.reduce(np.abs(blocks), axis=-1, initial=0)
    d = peak / np.float32(127)
    inverse = np.where(peak > 0, div(np.float32(127), peak), np.float32(0)).astype(np.float32)
    q = _to_int8(blocks, inverse)
    out.values[...] = q.reshape(x.shape)
    out.scales[...] = half_to_float(float_to_half(d))
    out.sums[...] = q.sum(axis=-1, dtype=np.int32)
    with np.errstate(all="ignore"):
        out.offsets[...] = half_to_float(float_to_half(d * out.sums.astype(np.float32)))


def _round_256(x: F32, out: Rounded) -> None:
    blocks = x.reshape(len(x), -1, 256)
    size = np.where(np.isnan(blocks), np.float32(0), np.abs(blocks))
    peak = np.take_along_axis(blocks, size.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    inverse = np.where(np.abs(peak) > 0, div(np.float32(-127), peak), np.float32(0)).astype(np.float32)
    usable = np.isfinite(inverse) & (inverse != 0)
    q = _to_int8(blocks, inverse)
    out.values[...] = q.reshape(x.shape)
    out.scales[...] = np.where(usable, div(np.float32(1), inverse), np.where(np.isinf(peak), peak, np.float32(0)))
    out.sums[...] = q.reshape(len(x), -1, 16).sum(axis=-1, dtype=np.int32)
