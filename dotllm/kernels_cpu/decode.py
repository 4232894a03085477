"""One block of any quantised type as float32, a value at a time: the naive form behind every product.

The layouts are drawn in `dotllm.gguf.dequantize`, whose values these are to the bit. `decode_block(type, raw, at, out,
to)` writes the values of the block at byte `at` of raw from out[to] on; `type` is a literal name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from dotllm.gguf.dequantize import IQ4_VALUES, MXFP4_VALUES
from dotllm.kernels_cpu.lanes import bfloat_to_float, bits_to_float, half_to_float

__all__ = ["DECODERS", "block_minimum", "decode_block"]

_PLAIN = np.arange(32, dtype=np.float32)
_Q4_0, _Q5_0 = _PLAIN - np.float32(8), _PLAIN - np.float32(16)
_IQ4, _MXFP4 = np.asarray(IQ4_VALUES, np.float32), np.asarray(MXFP4_VALUES, np.float32)


@njit
def _half(raw: Any, at: int) -> Any:
    return half_to_float(np.uint16(np.int64(raw[at]) | (np.int64(raw[at + 1]) << 8)))


@njit
def _word(raw: Any, at: int) -> Any:
    word = (
        np.int64(raw[at]) | (np.int64(raw[at + 1]) << 8) | (np.int64(raw[at + 2]) << 16) | (np.int64(raw[at + 3]) << 24)
    )
    return bits_to_float(np.int32(word - ((word >> 31) << 32)))


@njit
def _nibble_block(raw: Any, at: int, fifth: int, d: Any, table: Any, out: Any, to: int) -> None:
    """Sixteen bytes of nibbles, low ones first; `fifth` is where 32 more bits lie, or -1."""
    for j in range(32):
        q = np.int64(raw[at + j]) & 15 if j < 16 else np.int64(raw[at + j - 16]) >> 4
        if fifth >= 0:
            q |= ((np.int64(raw[fifth + j // 8]) >> (j % 8)) & 1) << 4
        out[to + j] = d * table[q]


@njit
def _add(out: Any, to: int, m: Any) -> None:
    for j in range(32):
        out[to + j] += m


@njit
def _f32(raw: Any, at: int, out: Any, to: int) -> None:
    out[to] = _word(raw, at)


@njit
def _f16(raw: Any, at: int, out: Any, to: int) -> None:
    out[to] = _half(raw, at)


@njit
def _bf16(raw: Any, at: int, out: Any, to: int) -> None:
    out[to] = bfloat_to_float(np.uint16(np.int64(raw[at]) | (np.int64(raw[at + 1]) << 8)))


@njit
def _q4_0(raw: Any, at: int, out: Any, to: int) -> None:
    _nibble_block(raw, at + 2, -1, _half(raw, at), _Q4_0, out, to)


@njit
def _q4_1(raw: Any, at: int, out: Any, to: int) -> None:
    _nibble_block(raw, at + 4, -1, _half(raw, at), _PLAIN, out, to)
    _add(out, to, _half(raw, at + 2))


@njit
def _q5_0(raw: Any, at: int, out: Any, to: int) -> None:
    _nibble_block(raw, at + 6, at + 2, _half(raw, at), _Q5_0, out, to)


@njit
def _q5_1(raw: Any, at: int, out: Any, to: int) -> None:
    _nibble_block(raw, at + 8, at + 4, _half(raw, at), _PLAIN, out, to)
    _add(out, to, _half(raw, at + 2))


@njit
def _iq4_nl(raw: Any, at: int, out: Any, to: int) -> None:
    _nibble_block(raw, at + 2, -1, _half(raw, at), _IQ4, out, to)


@njit
def _mxfp4(raw: Any, at: int, out: Any, to: int) -> None:
    e = np.int64(raw[at])  # 2 ** (e - 128), denormal for e < 2
    d = bits_to_float(np.int32((e - 1) << 23 if e >= 2 else 0x200000 << e))
    _nibble_block(raw, at + 1, -1, d, _MXFP4, out, to)


@njit
def _q8_0(raw: Any, at: int, out: Any, to: int) -> None:
    d = _half(raw, at)
    for j in range(32):
        out[to + j] = d * np.float32(np.int8(raw[at + 2 + j]))


@njit
def _q1_0(raw: Any, at: int, out: Any, to: int) -> None:
    d = _half(raw, at)
    for j in range(128):
        out[to + j] = d * np.float32(2 * ((np.int64(raw[at + 2 + j // 8]) >> (j % 8)) & 1) - 1)


@njit
def _q2_0(raw: Any, at: int, out: Any, to: int) -> None:
    d = _half(raw, at)
    for j in range(64):
        out[to + j] = d * np.float32(((np.int64(raw[at + 2 + j // 4]) >> (2 * (j % 4))) & 3) - 1)


@njit
def _pair(raw: Any, at: int, j: int) -> Any:
    """2-bit number j of 256: in each half, 32 bytes give bits 0-1, then 2-3, 4-5, 6-7."""
    return (np.int64(raw[at + 32 * (j // 128) + j % 32]) >> (2 * (j % 128 // 32))) & 3


@njit
def _q2_k(raw: Any, at: int, out: Any, to: int) -> None:
    d, dmin = _half(raw, at + 80), _half(raw, at + 82)
    for i in range(16):
        packed = np.int64(raw[at + i])
        scale, least = d * np.float32(packed & 15), dmin * np.float32(packed >> 4)
        for j in range(16 * i, 16 * i + 16):
            out[to + j] = scale * np.float32(_pair(raw, at + 16, j)) - least


@njit
def _q3_k(raw: Any, at: int, out: Any, to: int) -> None:
    d = _half(raw, at + 108)
    for i in range(16):
        low = np.int64(raw[at + 96 + i % 8]) >> (4 * (i // 8)) & 15
        scale = d * np.float32((low | (((np.int64(raw[at + 104 + i % 4]) >> (2 * (i // 4))) & 3) << 4)) - 32)
        for j in range(16 * i, 16 * i + 16):
            third = (np.int64(raw[at + j % 32]) >> (j // 32)) & 1
            out[to + j] = scale * np.float32(_pair(raw, at + 32, j) - 4 * (1 - third))


@njit
def _six_bits(raw: Any, at: int, i: int, minimum: int) -> Any:
    """Scale (minimum 0) or minimum (1) of sub-block i in the twelve packed bytes of Q4_K and Q5_K."""
    if i < 4:
        return np.float32(np.int64(raw[at + 4 * minimum + i]) & 63)
    low = (np.int64(raw[at + 4 + i]) >> (4 * minimum)) & 15
    return np.float32(low | ((np.int64(raw[at + 4 * minimum + i - 4]) >> 6) << 4))


@njit
def _k_block(raw: Any, at: int, fifth: int, nibbles: int, out: Any, to: int) -> None:
    d, dmin = _half(raw, at), _half(raw, at + 2)
    for i in range(8):
        scale, least = d * _six_bits(raw, at + 4, i, 0), dmin * _six_bits(raw, at + 4, i, 1)
        for j in range(32):
            q = (np.int64(raw[nibbles + 32 * (i // 2) + j]) >> (4 * (i % 2))) & 15
            if fifth >= 0:
                q |= ((np.int64(raw[fifth + j]) >> i) & 1) << 4
            out[to + 32 * i + j] = scale * np.float32(q) - least


@njit
def _q4_k(raw: Any, at: int, out: Any, to: int) -> None:
    _k_block(raw, at, -1, at + 16, out, to)


@njit
def _q5_k(raw: Any, at: int, out: Any, to: int) -> None:
    _k_block(raw, at, at + 16, at + 48, out, to)


@njit
def _q6_k(raw: Any, at: int, out: Any, to: int) -> None:
    d = _half(raw, at + 208)
    for i in range(16):
        scale = d * np.float32(np.int8(raw[at + 192 + i]))
        for j in range(16 * i, 16 * i + 16):
            half, group, byte = j // 128, j % 128 // 32, j % 32
            low = (np.int64(raw[at + 64 * half + 32 * (group % 2) + byte]) >> (4 * (group // 2))) & 15
            high = (np.int64(raw[at + 128 + 32 * half + byte]) >> (2 * group)) & 3
            out[to + j] = scale * np.float32((low | (high << 4)) - 32)


@njit
def _iq4_xs(raw: Any, at: int, out: Any, to: int) -> None:
    d, high = _half(raw, at), np.int64(raw[at + 2]) | (np.int64(raw[at + 3]) << 8)
    for i in range(8):
        low = (np.int64(raw[at + 4 + i // 2]) >> (4 * (i % 2))) & 15
        scale = d * np.float32((low | (((high >> (2 * i)) & 3) << 4)) - 32)
        _nibble_block(raw, at + 8 + 16 * i, -1, scale, _IQ4, out, to + 32 * i)


@njit
def _ternary(byte: int, digit: int) -> Any:
    power = 1
    for _ in range(digit):
        power *= 3
    return np.float32((((byte * power) & 255) * 3 >> 8) - 1)


@njit
def _tq1_0(raw: Any, at: int, out: Any, to: int) -> None:
    d = _half(raw, at + 52)
    for j in range(256):
        if j < 160:
            value = _ternary(np.int64(raw[at + j % 32]), j // 32)
        elif j < 240:
            value = _ternary(np.int64(raw[at + 32 + (j - 160) % 16]), (j - 160) // 16)
        else:
            value = _ternary(np.int64(raw[at + 48 + (j - 240) % 4]), (j - 240) // 4)
        out[to + j] = d * value


@njit
def _tq2_0(raw: Any, at: int, out: Any, to: int) -> None:
    d = _half(raw, at + 64)
    for j in range(256):
        out[to + j] = d * np.float32(_pair(raw, at, j) - 1)


DECODERS = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
"""The types that products can be computed with."""


def decode_block(type: Any, raw: Any, at: Any, out: Any, to: Any) -> None:
    """Write the values of one block; `type` is a key of `DECODERS`."""
    DECODERS[type](raw, at, out, to)


@njit
def block_minimum(raw: Any, at: int) -> Any:
    """The minimum of a block of Q4_1 or Q5_1, which multiplies the rounded sum of the activations."""
    return _half(raw, at + 2)


def _decoder(type: Any, raw: Any, at: Any, out: Any, to: Any) -> Any:
    decode = DECODERS[type.literal_value]
    return lambda type, raw, at, out, to: decode(raw, at, out, to)


overload(decode_block, prefer_literal=True, strict=False)(_decoder)
