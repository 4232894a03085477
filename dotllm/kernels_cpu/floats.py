"""The product for float32, float16 and bfloat16 weights: as `naive`, to the bit, but read sixteen at a time.

Rows are padded with zeros to a multiple of sixteen, so weights are experts x width x padded columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba.extending import overload

from dotllm.kernels_cpu.lanes import fma16, load16, load16_bfloat, load16_half, sum16, zero16
from dotllm.kernels_cpu.product import compile_product, share

__all__ = ["FLOATS", "float_product", "typed", "weights16"]


FLOATS = ("F32", "F16", "BF16")
"""The types that have this product."""

_READERS = {"F32": load16, "F16": load16_half, "BF16": load16_bfloat}


def typed(format: Any, weights: Any) -> Any:
    """Flat bytes as float32 or 16-bit words; `format` is a literal. Once a call: a view in a loop costs its checks."""
    return weights.view(np.float32) if format == "F32" else weights.view(np.uint16)


def weights16(format: Any, weights: Any, at: Any) -> Any:
    """Weights at .. at + 16 of a typed array; `format` is a literal."""
    return _READERS[format](weights, at)


def _view(format: Any, weights: Any) -> Any:
    if format.literal_value == "F32":
        return lambda format, weights: weights.view(np.float32)
    return lambda format, weights: weights.view(np.uint16)


def _reader(format: Any, weights: Any, at: Any) -> Any:
    read = _READERS[format.literal_value]
    return lambda format, weights, at: read(weights, at)


overload(typed, prefer_literal=True, strict=False)(_view)
overload(weights16, prefer_literal=True, strict=False)(_reader)


@cache
def float_product(format: str) -> Any:
    """The product of weights of `format`, one of its parts; x is (unused, padded float32 rows, unused, unused)."""

    def product(
        weights: Any,
        columns: int,
        x: Any,
        work: Any,
        out: Any,
        width: int,
        bias: Any,
        add: bool,
        part: int,
        parts: int,
    ) -> None:
        values, array = x[1], typed(format, weights)
        starts, experts, sources, targets = work
        groups, padded = (width + 15) // 16, (columns + 15) // 16 * 16
        first, last = share(starts, width, part, parts)
        for item in range(first, last):
            segment, group = item // groups, item % groups
            for n in range(16 * group, min(16 * group + 16, width)):
                base = (experts[segment] * width + n) * padded
                for pair in range(starts[segment], starts[segment + 1]):
                    source, lanes = sources[pair] * padded, zero16()
                    for i in range(0, padded, 16):
                        lanes = fma16(weights16(format, array, base + i), load16(values, source + i), lanes)
                    y = sum16(lanes)
                    if bias.size > 0:
                        y = y + bias[n]
                    at = targets[pair] * width + n
                    out[at] = out[at] + y if add else y

    return compile_product(product, format)
