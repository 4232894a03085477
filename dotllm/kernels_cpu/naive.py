"""The product for weights of any type: each row is written out as float32 and multiplied, sixteen lanes at a time.

    lane l adds w[l] x[l], w[l + 16] x[l + 16], ... in that order; then the lanes are folded (`sum16`)

It is the definition that the interleaved products are tested against, and what runs where there is none of them.
Arguments and work are those of `product`, except that weights are experts x width x blocks x block bytes as in the
file, and x is (unused, values as float32 rows of a multiple of 16, unused, error of the rounded sums).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from dotllm.gguf.types import FORMATS, GGMLType
from dotllm.kernels_cpu.decode import block_minimum, decode_block
from dotllm.kernels_cpu.lanes import fma, fma16, load16, sum16, zero16
from dotllm.kernels_cpu.product import compile_product, share

__all__ = ["naive_product"]


@njit
def _dot(w: Any, x: Any, at: int) -> Any:
    """The product of w with x[at : at + w.size]; the size is a multiple of 16."""
    lanes = zero16()
    for i in range(0, w.size, 16):
        lanes = fma16(load16(w, i), load16(x, at + i), lanes)
    return sum16(lanes)


@cache
def naive_product(format: str) -> Any:
    """The product of weights of `format` as they are in the file, one of its parts."""
    elements, size = FORMATS[GGMLType[format]].elements, FORMATS[GGMLType[format]].bytes
    has_minimum = int(FORMATS[GGMLType[format]].activation == "Q8_1")

    def product(
        weights: Any,
        blocks: int,
        x: Any,
        work: Any,
        out: Any,
        width: int,
        bias: Any,
        add: bool,
        part: int,
        parts: int,
    ) -> None:
        _, values, _, error = x
        starts, experts, sources, targets = work
        groups = (width + 15) // 16
        row = np.zeros((blocks * elements + 15) // 16 * 16, np.float32)
        first, last = share(starts, width, part, parts)
        for item in range(first, last):
            segment, group = item // groups, item % groups
            for n in range(16 * group, min(16 * group + 16, width)):
                base = (experts[segment] * width + n) * blocks * size
                for b in range(blocks):
                    decode_block(format, weights, base + b * size, row, b * elements)
                for pair in range(starts[segment], starts[segment + 1]):
                    y = _dot(row, values, sources[pair] * row.size)
                    if has_minimum:
                        for b in range(blocks):
                            y = fma(block_minimum(weights, base + b * size), error[sources[pair] * blocks + b], y)
                    if bias.size > 0:
                        y = y + bias[n]
                    at = targets[pair] * width + n
                    out[at] = out[at] + y if add else y

    return compile_product(product, format)
