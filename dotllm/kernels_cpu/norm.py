"""Root mean square norm of rows, plain and gated.

rms_norm     y = x * w / sqrt(mean(x^2) + eps)            gated_norm   x = rms_norm(x, w) * silu(z), in place

x, flat      | row 0: x0 x1 .. xE-1 | row 1 ...           lane l of the sum of squares adds x[l], x[l + 16], ...;
lanes         0123456789abcdef0123..tail                  the lanes are folded, then the tail is added in order
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dotllm.kernels_cpu.lanes import div, fma, fma16, load16, splat16, sqrt, store16, sum16, zero16
from dotllm.kernels_cpu.mathfun import silu

__all__ = ["gated_norm_part", "inverse_rms", "norm_row", "rms_norm_part", "sum_squares"]


@njit(cache=True)
def sum_squares(x: Any, at: int, size: int) -> Any:
    """The sum of x[at + i]^2, i < size, as float32."""
    whole = size - size % 16
    lanes = zero16()
    for i in range(at, at + whole, 16):
        value = load16(x, i)
        lanes = fma16(value, value, lanes)
    total = sum16(lanes)
    for i in range(at + whole, at + size):
        total = fma(x[i], x[i], total)
    return total


@njit(cache=True)
def inverse_rms(x: Any, at: int, size: int, eps: float) -> Any:
    """1 / sqrt(mean(x^2) + eps) of one row of `size` values."""
    mean = div(sum_squares(x, at, size), np.float32(size))
    return div(np.float32(1.0), sqrt(mean + np.float32(eps)))


@njit(cache=True)
def norm_row(x: Any, at: int, weight: Any, size: int, eps: float, out: Any, to: int, add: bool) -> None:
    """out[to + i] = norm of x[at + i] (added to what is there with `add`); out may be x itself."""
    whole = size - size % 16
    factor = inverse_rms(x, at, size, eps)
    factors = splat16(factor)
    for i in range(0, whole, 16):
        y = load16(x, at + i) * factors * load16(weight, i)
        if add:
            y = load16(out, to + i) + y
        store16(out, to + i, y)
    for i in range(whole, size):
        value = x[at + i] * factor * weight[i]
        out[to + i] = out[to + i] + value if add else value


@njit(cache=True)
def rms_norm_part(
    x: Any, weight: Any, eps: float, out: Any, stride: int, column: int, add: bool, rows: int,
    thread: int, n_threads: int,
) -> None:  # fmt: skip
    # x (M * E,), weight (E,), out (M * stride,): columns column .. column + E are written
    size = weight.size
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        norm_row(x, row * size, weight, size, eps, out, row * stride + column, add)


@njit(cache=True)
def gated_norm_part(x: Any, weight: Any, z: Any, eps: float, rows: int, thread: int, n_threads: int) -> None:
    # x, z (rows * D,), weight (D,): a row is one head of one token
    size = weight.size
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        at = row * size
        factor = splat16(inverse_rms(x, at, size, eps))
        for i in range(0, size, 16):
            store16(x, at + i, load16(x, at + i) * factor * load16(weight, i) * silu(load16(z, at + i)))
