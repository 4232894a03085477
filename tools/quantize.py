"""Quantise float32 rows to any GGUF tensor type: plain and not optimal, for small test files.

gguf-py packs the simple types; the K-quants, IQ4_NL, IQ4_XS, Q1_0 and Q2_0 are packed here, each function being the
inverse of the one of the same name in `dotllm/gguf/dequantize.py`, where the layouts are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.dequantize import IQ4_VALUES
from dotllm.gguf.types import FORMATS, GGMLType

__all__ = ["quantize"]

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]


def quantize(values: NDArray[Any], type: GGMLType) -> Blocks:
    """Rows (..., n) as bytes (..., row_bytes); n must be a multiple of the block size."""
    block = FORMATS[type]
    values = np.ascontiguousarray(values, np.float32)
    if values.shape[-1] % block.elements:
        raise ValueError(f"rows of {values.shape[-1]} values do not divide into {type.name} blocks of {block.elements}")
    if type in _PACKERS:
        packed = _PACKERS[type](values.reshape(-1, block.elements))
    elif type is GGMLType.F16:
        packed = values.astype("<f2").view(np.uint8)
    else:
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType(int(type))).view(np.uint8)
    return packed.reshape(*values.shape[:-1], values.shape[-1] // block.elements * block.bytes)


def _half(x: Values) -> tuple[Blocks, Values]:
    """A scale for each block (count, 1): its two bytes, and the value that they hold."""
    rounded = x.astype("<f2")
    return rounded.view(np.uint8), rounded.astype(np.float32)


def _divide(x: Values, by: Values) -> Values:
    """x / by, and 0 where `by` is 0."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


def _round(x: Values, least: int, most: int) -> NDArray[np.int64]:
    return np.clip(np.rint(x), least, most).astype(np.int64)


def _widest(x: Values) -> Values:
    """The value of greatest magnitude along the last axis, with its sign; that axis stays with length 1."""
    return np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)


def _bytes(*parts: NDArray[Any]) -> Blocks:
    return np.concatenate([part.reshape(len(part), -1).astype(np.uint8) for part in parts], axis=-1)


def _nibbles(q: NDArray[np.int64]) -> NDArray[np.int64]:
    half = q.shape[-1] // 2
    return (q[..., :half] & 15) | ((q[..., half:] & 15) << 4)


def _pairs(q: NDArray[np.int64]) -> NDArray[np.int64]:
    shifts = np.array([0, 2, 4, 6]).reshape(4, 1)
    return ((q.reshape(-1, 2, 4, 32) & 3) << shifts).sum(2).reshape(-1, 64)


def _bit_of_each(q: NDArray[np.int64], bit: int) -> NDArray[np.int64]:
    """Bit `bit` of value 32 i + j at bit i of byte j."""
    return (((q.reshape(-1, 8, 32) >> bit) & 1) << np.arange(8).reshape(8, 1)).sum(1)


def _with_minimum(x: Values, size: int, most: int, most_scale: int) -> tuple[Any, ...]:
    """Sub-blocks of `size` as d scale q - dmin minimum: bytes of d, bytes of dmin, scales, minima, q (count, ...)."""
    sub = x.reshape(len(x), -1, size)
    least = np.maximum(-sub.min(-1), 0)
    span = np.maximum(sub.max(-1) + least, 0) / most
    d_bytes, d = _half(span.max(-1, keepdims=True) / most_scale)
    m_bytes, dmin = _half(least.max(-1, keepdims=True) / most_scale)
    scale, minimum = _round(_divide(span, d), 0, most_scale), _round(_divide(least, dmin), 0, most_scale)
    step, offset = (d * scale).astype(np.float32), (dmin * minimum).astype(np.float32)
    q = _round(_divide(sub + offset[:, :, None], step[:, :, None]), 0, most)
    return d_bytes, m_bytes, scale, minimum, q.reshape(len(x), -1)


def _symmetric(x: Values, size: int, half: int, most_scale: int) -> tuple[Any, ...]:
    """Sub-blocks of `size` as d scale (q - half): bytes of d, signed scales, q (count, elements)."""
    sub = x.reshape(len(x), -1, size)
    step = _widest(sub)[:, :, 0] / -half
    d_bytes, d = _half(np.abs(step).max(-1, keepdims=True) / most_scale)
    scale = _round(_divide(step, d), -most_scale, most_scale)
    q = _round(_divide(sub, (d * scale).astype(np.float32)[:, :, None]), -half, half - 1) + half
    return d_bytes, scale, q.reshape(len(x), -1)


def _q2_k(x: Values) -> Blocks:
    d, dmin, scale, minimum, q = _with_minimum(x, 16, 3, 15)
    return _bytes(scale | (minimum << 4), _pairs(q), d, dmin)


def _q3_k(x: Values) -> Blocks:
    d, scale, q = _symmetric(x, 16, 4, 31)
    scale = scale + 32
    upper = ((scale >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6]).reshape(4, 1)).sum(1)
    return _bytes(_bit_of_each(q, 2), _pairs(q), _nibbles(scale), upper, d)


def _scales_and_mins(scale: NDArray[np.int64], minimum: NDArray[np.int64]) -> NDArray[np.int64]:
    first = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    second = minimum[:, :4] | ((minimum[:, 4:] >> 4) << 6)
    third = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=-1)


def _q4_k(x: Values) -> Blocks:
    d, dmin, scale, minimum, q = _with_minimum(x, 32, 15, 63)
    return _bytes(d, dmin, _scales_and_mins(scale, minimum), _nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128))


def _q5_k(x: Values) -> Blocks:
    d, dmin, scale, minimum, q = _with_minimum(x, 32, 31, 63)
    nibbles = _nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)
    return _bytes(d, dmin, _scales_and_mins(scale, minimum), _bit_of_each(q, 4), nibbles)


def _q6_k(x: Values) -> Blocks:
    d, scale, q = _symmetric(x, 16, 32, 127)
    return _bytes(_nibbles(q.reshape(-1, 2, 128)).reshape(-1, 128), _pairs(q >> 4), scale, d)


def _nearest_iq4(x: Values) -> NDArray[np.int64]:
    table = np.array(IQ4_VALUES, np.float32)
    return np.searchsorted((table[1:] + table[:-1]) / 2, x).astype(np.int64)


def _iq4_nl(x: Values) -> Blocks:
    d_bytes, d = _half(_widest(x) / IQ4_VALUES[0])
    return _bytes(d_bytes, _nibbles(_nearest_iq4(_divide(x, d))))


def _iq4_xs(x: Values) -> Blocks:
    sub = x.reshape(-1, 8, 32)
    step = _widest(sub)[:, :, 0] / IQ4_VALUES[0]
    d_bytes, d = _half(np.abs(step).max(-1, keepdims=True) / 31)
    scale = _round(_divide(step, d), -31, 31)
    q = _nearest_iq4(_divide(sub, (d * scale).astype(np.float32)[:, :, None]))
    scale = scale + 32
    upper = ((scale >> 4) << (2 * np.arange(8))).sum(-1).astype("<u2").reshape(-1, 1).view(np.uint8)
    lower = (scale[:, ::2] & 15) | ((scale[:, 1::2] & 15) << 4)
    return _bytes(d_bytes, upper, lower, _nibbles(q))


def _q1_0(x: Values) -> Blocks:
    d, _ = _half(np.abs(x).mean(-1, keepdims=True))
    return _bytes(d, np.packbits(x > 0, axis=-1, bitorder="little"))


def _q2_0(x: Values) -> Blocks:
    """A step of 1.2 standard deviations loses least on normally distributed weights."""
    d_bytes, d = _half(1.2 * np.sqrt((x * x).mean(-1, keepdims=True)))
    q = _round(_divide(x, d), -1, 2) + 1
    return _bytes(d_bytes, (q.reshape(-1, 16, 4) << np.array([0, 2, 4, 6])).sum(-1))


_PACKERS: Mapping[GGMLType, Callable[[Values], Blocks]] = {
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.Q1_0: _q1_0,
    GGMLType.Q2_0: _q2_0,
}
