"""What crosses lanes or touches memory, in Python: the definitions behind `lanes`, checked against array bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from dotllm.ops.float32 import bfloat_to_float, float_to_half, half_to_float, maximum

__all__ = [
    "WIDTH",
    "lane16",
    "load16",
    "load16_bfloat",
    "load16_half",
    "peak16",
    "splat16",
    "store16",
    "store16_half",
    "store16_int8",
    "sum16",
    "zero16",
]

WIDTH = 16


def _span(array: Any, index: int) -> slice:
    first = int(index)
    if array.ndim != 1 or first < 0 or first + WIDTH > array.size:
        raise IndexError(f"lanes {first}..{first + WIDTH} lie outside an array of shape {array.shape}")
    return slice(first, first + WIDTH)


def load16(array: Any, index: int) -> Any:
    """array[index : index + 16] of a contiguous float32 array."""
    return array[_span(array, index)].copy()


def load16_half(array: Any, index: int) -> Any:
    """The same from float16 bits (uint16)."""
    return half_to_float(array[_span(array, index)])


def load16_bfloat(array: Any, index: int) -> Any:
    """The same from bfloat16 bits (uint16)."""
    return bfloat_to_float(array[_span(array, index)])


def store16(array: Any, index: int, value: Any) -> None:
    """array[index : index + 16] = value."""
    array[_span(array, index)] = value


def store16_half(array: Any, index: int, value: Any) -> None:
    """The same to float16 bits (uint16), rounded to nearest even."""
    array[_span(array, index)] = float_to_half(value)


def store16_int8(array: Any, index: int, value: Any) -> None:
    """The same to int8, for integral values within -128 .. 127."""
    array[_span(array, index)] = value.astype(np.int8)


def lane16(v: Any, index: int) -> Any:
    """One lane of a vector, 0 <= index < 16."""
    if not 0 <= index < WIDTH:
        raise IndexError(f"a vector has {WIDTH} lanes, not a lane {index}")
    return v[index]


def splat16(x: Any) -> Any:
    """Sixteen copies of a float32."""
    return np.full(WIDTH, x, np.float32)


def zero16() -> Any:
    """Sixteen zeros."""
    return np.zeros(WIDTH, np.float32)


def sum16(v: Any) -> Any:
    """The sum of the lanes: v[0:8] + v[8:16], then 4 + 4, 2 + 2, 1 + 1."""
    for half in (8, 4, 2, 1):
        v = v[:half] + v[half : 2 * half]
    return v[0]


def peak16(v: Any) -> Any:
    """The largest lane, over the same tree as `sum16`."""
    for half in (8, 4, 2, 1):
        v = maximum(v[:half], v[half : 2 * half])
    return v[0]
