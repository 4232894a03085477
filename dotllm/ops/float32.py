"""Float32 primitives that give the same bits on every machine: NumPy definitions for scalars and arrays alike.

`dotllm.kernels_cpu.lanes` gives each of them a compiled form with the same results, for a float32 and for a vector of
sixteen; text written in these primitives (mathfun, rounding) therefore runs unchanged in NumPy and in kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = [
    "absolute",
    "bfloat_to_float",
    "bits_to_float",
    "div",
    "exponent_of",
    "float_to_bfloat",
    "float_to_bits",
    "float_to_half",
    "fma",
    "half_to_float",
    "like",
    "maximum",
    "minimum",
    "pow2",
    "rint",
    "round_half",
    "sqrt",
    "where_less",
]

_F32_MAX = float(np.finfo(np.float32).max)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once, for float32 scalars or arrays.

    The product of two float32 is exact in float64. The sum is rounded to odd (its last bit remembers that something
    was cut off), so that the final rounding to float32 is the only one that counts.
    """
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or isinstance(c, np.ndarray):
        return _fma_arrays(a, b, c)
    product, addend = float(a) * float(b), float(c)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    if error != 0.0 and math.isfinite(total) and (total / math.ulp(total)) % 2.0 == 0.0:
        total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    if abs(total) > _F32_MAX:
        with np.errstate(over="ignore"):
            return np.float32(total)
    return np.float32(total)


def _fma_arrays(a: Any, b: Any, c: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product, addend = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
        move = (error != 0) & np.isfinite(total) & even.reshape(total.shape)
        total = np.where(move, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
        return total.astype(np.float32)


def like(x: Any, value: float) -> Any:
    """The constant `value` as float32, in the shape of x (a scalar broadcasts in NumPy)."""
    return np.float32(value)


def div(a: Any, b: Any) -> Any:
    """a / b; a zero divisor gives an infinity or NaN."""
    with np.errstate(all="ignore"):
        return a / b


def sqrt(a: Any) -> Any:
    """The square root, correctly rounded."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(a)


def rint(a: Any) -> Any:
    """Nearest integer, halves to even."""
    return np.rint(a)


def absolute(a: Any) -> Any:
    """The value without its sign."""
    return np.abs(a)


def maximum(a: Any, b: Any) -> Any:
    """a if a > b else b (so b where either is NaN)."""
    return where_less(b, a, a, b)


def minimum(a: Any, b: Any) -> Any:
    """a if a < b else b (so b where either is NaN)."""
    return where_less(a, b, a, b)


def where_less(a: Any, b: Any, x: Any, y: Any) -> Any:
    """x where a < b, else y (also where either is NaN)."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.where(a < b, x, y)
    return x if a < b else y


def pow2(n: Any) -> Any:
    """2 ** n for an integral float32 n in -126 .. 127; other inputs give unspecified bits."""
    with np.errstate(all="ignore"):
        bits = float_to_bits(n + np.float32(12582912.0))  # 1.5 * 2^23: the integer now sits in the low mantissa bits
        if isinstance(bits, np.ndarray):
            return ((bits.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    return bits_to_float(np.int32(((((int(bits) + 127) << 23) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000))


def exponent_of(x: Any) -> Any:
    """The integral float32 e with x * 2 ** -e in [sqrt(1/2), sqrt(2)), for positive normal x; else unspecified."""
    bits = float_to_bits(x)
    if isinstance(bits, np.ndarray):
        return ((bits - np.int32(0x3F3504F3)) >> np.int32(23)).astype(np.float32)
    return np.float32(((((int(bits) - 0x3F3504F3) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000) >> 23)


def float_to_bits(x: Any) -> Any:
    """The bits of a float32 as int32."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x, np.float32).view(np.int32).reshape(x.shape)
    return np.float32(x).view(np.int32)


def bits_to_float(bits: Any) -> Any:
    """The float32 with these int32 bits."""
    if isinstance(bits, np.ndarray):
        return np.ascontiguousarray(bits, np.int32).view(np.float32).reshape(bits.shape)
    return np.int32(bits).view(np.float32)


def half_to_float(bits: Any) -> Any:
    """Float16 bits (uint16) to float32."""
    if isinstance(bits, np.ndarray):
        return np.ascontiguousarray(bits, np.uint16).view(np.float16).reshape(bits.shape).astype(np.float32)
    return np.float32(np.uint16(bits).view(np.float16))


def float_to_half(x: Any) -> Any:
    """Float32 to float16 bits (uint16), rounded to nearest even."""
    with np.errstate(over="ignore", under="ignore"):
        if isinstance(x, np.ndarray):
            return x.astype(np.float16).view(np.uint16)
        return np.float16(x).view(np.uint16)


def round_half(x: Any) -> Any:
    """The float16 nearest to x, as float32."""
    return half_to_float(float_to_half(x))


def bfloat_to_float(bits: Any) -> Any:
    """Bfloat16 bits (uint16) to float32."""
    if isinstance(bits, np.ndarray):
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return (np.uint32(bits) << np.uint32(16)).view(np.float32)


def float_to_bfloat(x: Any) -> Any:
    """Float32 to bfloat16 bits (uint16), rounded to nearest even; a NaN stays a (quiet) NaN."""
    if not isinstance(x, np.ndarray):
        return float_to_bfloat(np.full(1, x, np.float32))[0]
    bits = float_to_bits(x).view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(64), rounded).astype(np.uint16)
