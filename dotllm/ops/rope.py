"""Rotary angles: which frequency each pair turns with, and the table of cosines and sines.

The table is computed in float64 from additions, multiplications and one rounding only, so that it is the same on every
machine; cosines of a maths library are not.
"""

from __future__ import annotations

from math import factorial

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.hparams import RopeConfig

__all__ = ["cos_sin_table", "inverse_frequencies"]

# pi / 2 in three parts: products of the first two with an integer below 2^27 are exact
_HALF_PI = (1.5707963109016418, 1.5893254712295857e-08, 6.123233995736766e-17)
_SIN = [(-1.0) ** i / factorial(2 * i + 1) for i in range(9)]
_COS = [(-1.0) ** i / factorial(2 * i) for i in range(9)]


def inverse_frequencies(rope: RopeConfig, divisors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
    """Radians per position of each of the dimension / 2 pairs; `divisors` is the optional `rope_freqs` tensor.

    A pair that M-RoPE sections give to no text axis has frequency 0: it does not turn.
    """
    pairs = rope.dimension // 2
    frequency = np.float64(rope.base) ** (-2.0 * np.arange(pairs) / rope.dimension)
    if divisors is not None:
        frequency = frequency / divisors
    if rope.sections:
        t, h, w = rope.sections[:3]
        sector = np.arange(pairs) % sum(rope.sections)
        turns = [(s % 3 == 0 and s < 3 * t) or (s % 3 == 1 and s < 3 * h) or (s % 3 == 2 and s < 3 * w) for s in sector]
        frequency = np.where(turns, frequency, 0.0)
    return frequency


def _polynomial(coefficients: list[float], x2: NDArray[np.float64]) -> NDArray[np.float64]:
    y = np.full_like(x2, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y = y * x2 + c
    return y


def cos_sin_table(inverse_frequency: NDArray[np.float64], scale: float, length: int) -> NDArray[np.float32]:
    """(2, length, n) float32: cos and sin of position * scale * inverse_frequency[j]."""
    table = np.empty((2, length, len(inverse_frequency)), np.float32)
    for first in range(0, length, 4096):
        positions = np.arange(first, min(first + 4096, length), dtype=np.float64) * scale
        angle = positions[:, None] * inverse_frequency
        quarter = np.rint(angle * (2.0 / np.pi))
        x = ((angle - quarter * _HALF_PI[0]) - quarter * _HALF_PI[1]) - quarter * _HALF_PI[2]
        cos, sin = _polynomial(_COS, x * x), x * _polynomial(_SIN, x * x)
        turn = quarter.astype(np.int64) & 3
        rows = slice(first, first + len(positions))
        table[0, rows] = np.choose(turn, [cos, -sin, -cos, sin])
        table[1, rows] = np.choose(turn, [sin, cos, -sin, -cos])
    return table
