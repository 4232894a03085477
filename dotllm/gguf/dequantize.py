"""Quantised tensors as float32, in NumPy: what every packed type means.

This is the definition that fast kernels are tested with. A row is a run of blocks. Each function below turns blocks,
(count, bytes), into values, (count, elements), and starts with a picture of one block: `name[bytes]` in file order,
numbers little-endian, d and m float16. "Nibbles" are the low four bits of all bytes, then the high four of all bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.errors import ModelFileError
from dotllm.gguf.types import FORMATS, GGMLType

__all__ = ["IQ4_VALUES", "MXFP4_VALUES", "dequantize"]

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 codes of IQ4_NL and IQ4_XS stand for: finer near zero, where most weights are."""

MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the 16 values of a 4-bit float (sign, 2 bits of exponent, 1 of mantissa)."""


def dequantize(raw: NDArray[np.uint8], type: GGMLType) -> Values:
    """Rows of bytes (..., row_bytes) as float32 (..., n); raises ModelFileError if they are not whole blocks."""
    block = FORMATS[type]
    if raw.shape[-1] % block.bytes:
        raise ModelFileError(f"rows of {raw.shape[-1]} bytes do not divide into {type.name} blocks of {block.bytes}")
    blocks = np.ascontiguousarray(raw).reshape(-1, block.bytes)
    with np.errstate(invalid="ignore", over="ignore"):  # a broken scale may be infinite; its values follow IEEE rules
        values = _DECODERS[type](blocks)
    return values.astype(np.float32, copy=False).reshape(*raw.shape[:-1], raw.shape[-1] // block.bytes * block.elements)


def _plain(dtype: str) -> Callable[[Blocks], NDArray[Any]]:
    def decode(b: Blocks) -> NDArray[Any]:
        return b.view(dtype).copy()

    return decode


def _half(b: Blocks) -> Values:
    """The two bytes in the last axis as one float16."""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _nibbles(q: Blocks) -> Blocks:
    return np.concatenate([q & 15, q >> 4], axis=-1)


def _pairs(q: Blocks) -> Blocks:
    """2-bit numbers of (count, 64) bytes as (count, 256): in each half, 32 bytes give bits 0-1, then 2-3, 4-5, 6-7."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    return ((q.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)).reshape(-1, 256)


def _bits(b: Blocks) -> Blocks:
    """Bits as numbers, the lowest bit of the first byte first."""
    return np.unpackbits(b, axis=-1, bitorder="little")


def _bf16(b: Blocks) -> Values:
    """The upper half of a float32."""
    return (b.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(b: Blocks) -> Values:
    """d[2] nibbles[16]: d (q - 8)"""
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Blocks) -> Values:
    """d[2] m[2] nibbles[16]: d q + m"""
    return _half(b[:, :2]) * _nibbles(b[:, 4:]) + _half(b[:, 2:4])


def _q5_0(b: Blocks) -> Values:
    """d[2] fifth_bits[4] nibbles[16]: d (q - 16)"""
    q = _nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4)
    return _half(b[:, :2]) * (q.astype(np.float32) - 16)


def _q5_1(b: Blocks) -> Values:
    """d[2] m[2] fifth_bits[4] nibbles[16]: d q + m"""
    q = _nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4)
    return _half(b[:, :2]) * q + _half(b[:, 2:4])


def _q8_0(b: Blocks) -> Values:
    """d[2] signed_bytes[32]: d q"""
    return _half(b[:, :2]) * b[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(b: Blocks) -> Values:
    """scales[16] pairs[64] d[2] dmin[2]; each 16 values: d (scale & 15) q - dmin (scale >> 4)"""
    scale = _half(b[:, 80:82]) * (b[:, :16] & 15)
    least = _half(b[:, 82:84]) * (b[:, :16] >> 4)
    q = _pairs(b[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return scale[:, :, None] * q - least[:, :, None]


def _q3_k(b: Blocks) -> Values:
    """third_bits[32] pairs[64] scales[12] d[2]; each 16 values: d (scale - 32) (q - 4)

    Bit i of third_bits[j] belongs to value 32 i + j. Scales have 6 bits: eight bytes of nibbles, then four bytes whose
    bits 2g, 2g + 1 are the upper bits of scales 4g .. 4g + 3.
    """
    upper = [(b[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)]
    scale = _nibbles(b[:, 96:104]) | (np.concatenate(upper, axis=-1) << 4)
    third = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = _pairs(b[:, 32:96]) | (third.reshape(-1, 256) << 2)
    step = _half(b[:, 108:110]) * (scale.astype(np.float32) - 32)
    return step[:, :, None] * (q.reshape(-1, 16, 16).astype(np.float32) - 4)


def _scales_and_mins(b: Blocks) -> tuple[Values, Values]:
    """Of Q4_K and Q5_K: d[2] dmin[2] packed[12] as d scale and dmin min, eight each.

    scale and min have 6 bits: for sub-blocks 0-3 the low 6 bits of bytes 0-3 and 4-7; for 4-7 the nibbles of bytes
    8-11, with the top two bits of bytes 0-3 and 4-7 above them.
    """
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    least = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return _half(b[:, :2]) * scale, _half(b[:, 2:4]) * least


def _q4_k(b: Blocks) -> Values:
    """d[2] dmin[2] scales_and_mins[12] 4 x nibbles[32]; each 32 values: d scale q - dmin min"""
    scale, least = _scales_and_mins(b)
    q = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scale[:, :, None] * q - least[:, :, None]


def _q5_k(b: Blocks) -> Values:
    """d[2] dmin[2] scales_and_mins[12] fifth_bits[32] 4 x nibbles[32]; bit i of fifth_bits[j] is value 32 i + j's"""
    scale, least = _scales_and_mins(b)
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (fifth << 4)
    return scale[:, :, None] * q - least[:, :, None]


def _q6_k(b: Blocks) -> Values:
    """2 x nibbles[64] upper_pairs[64] signed_scales[16] d[2]; each 16 values: d scale (q - 32)"""
    q = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 256) | (_pairs(b[:, 128:192]) << 4)
    step = _half(b[:, 208:210]) * b[:, 192:208].view(np.int8)
    return step[:, :, None] * (q.reshape(-1, 16, 16).astype(np.float32) - 32)


def _iq4_nl(b: Blocks) -> Values:
    """d[2] nibbles[16]: d table[q]"""
    return _half(b[:, :2]) * np.array(IQ4_VALUES, np.float32)[_nibbles(b[:, 2:])]


def _iq4_xs(b: Blocks) -> Values:
    """d[2] upper_scale_bits[2] lower_scale_bits[4] 8 x nibbles[16]; each 32 values: d (scale - 32) table[q]"""
    lower = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    upper = (b[:, 2:4].copy().view("<u2") >> (2 * np.arange(8, dtype=np.uint16))) & 3
    step: Values = _half(b[:, :2]) * ((lower | (upper << 4)).astype(np.float32) - 32)
    q = _nibbles(b[:, 8:].reshape(-1, 8, 16))
    return step[:, :, None] * np.array(IQ4_VALUES, np.float32)[q]


def _mxfp4(b: Blocks) -> Values:
    """exponent[1] nibbles[16]: 2^(exponent - 128) table[q]"""
    scale: Values = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return scale * np.array(MXFP4_VALUES, np.float32)[_nibbles(b[:, 1:])]


def _q1_0(b: Blocks) -> Values:
    """d[2] bits[16]: d or -d"""
    return _half(b[:, :2]) * (_bits(b[:, 2:]).astype(np.float32) * 2 - 1)


def _q2_0(b: Blocks) -> Values:
    """d[2] pairs[16], four neighbours in a byte, lowest bits first: d (q - 1)"""
    q = (b[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return _half(b[:, :2]) * (q.reshape(-1, 64).astype(np.float32) - 1)


def _tq1_0(b: Blocks) -> Values:
    """digits[32] digits[16] digits[4] d[2]: d (digit - 1)

    A byte is a fraction in base 3, byte / 256 = 0.t1 t2 t3 t4 t5: multiplied by 3^n, its next digit is the integer
    part. The three runs hold 5, 5 and 4 digits a byte, all first digits before all second digits.
    """

    def digits(run: Blocks, count: int) -> Blocks:
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
        fractions = (run[:, None, :] * powers).astype(np.uint16) & 255
        return ((fractions * 3) >> 8).astype(np.uint8).reshape(len(run), -1)

    q = np.concatenate([digits(b[:, :32], 5), digits(b[:, 32:48], 5), digits(b[:, 48:52], 4)], axis=-1)
    return _half(b[:, 52:54]) * (q.astype(np.float32) - 1)


def _tq2_0(b: Blocks) -> Values:
    """pairs[64] d[2]: d (q - 1)"""
    return _half(b[:, 64:66]) * (_pairs(b[:, :64]).astype(np.float32) - 1)


_DECODERS: Mapping[GGMLType, Callable[[Blocks], NDArray[Any]]] = MappingProxyType(
    {
        GGMLType.F32: _plain("<f4"),
        GGMLType.F16: _plain("<f2"),
        GGMLType.BF16: _bf16,
        GGMLType.F64: _plain("<f8"),
        GGMLType.I8: _plain("<i1"),
        GGMLType.I16: _plain("<i2"),
        GGMLType.I32: _plain("<i4"),
        GGMLType.I64: _plain("<i8"),
        GGMLType.Q4_0: _q4_0,
        GGMLType.Q4_1: _q4_1,
        GGMLType.Q5_0: _q5_0,
        GGMLType.Q5_1: _q5_1,
        GGMLType.Q8_0: _q8_0,
        GGMLType.Q2_K: _q2_k,
        GGMLType.Q3_K: _q3_k,
        GGMLType.Q4_K: _q4_k,
        GGMLType.Q5_K: _q5_k,
        GGMLType.Q6_K: _q6_k,
        GGMLType.IQ4_NL: _iq4_nl,
        GGMLType.IQ4_XS: _iq4_xs,
        GGMLType.MXFP4: _mxfp4,
        GGMLType.Q1_0: _q1_0,
        GGMLType.Q2_0: _q2_0,
        GGMLType.TQ1_0: _tq1_0,
        GGMLType.TQ2_0: _tq2_0,
    }
)
