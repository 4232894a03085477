"""Norm of each query and key head, then rotary position embedding, in place.

(a, b) -> (a cos - b sin, b cos + a sin)      angle of pair j = position * scale * inverse_frequency[j], j < n

one head of width D                            halves:   (x_j, x_j+n)         adjacent: (x_2j, x_2j+1)
| a0 a1 .. an-1 | b0 b1 .. bn-1 | untouched |            step 1, apart n                step 2, apart 1
table (2, length, n), flat: cosines of all positions, then sines
"""

from __future__ import annotations

from typing import Any

from numba import njit

from dotllm.kernels_cpu.norm import norm_row

__all__ = ["qk_norm_rope_part"]


@njit(cache=True)
def _rotate(x: Any, at: int, table: Any, cos_at: int, sin_at: int, pairs: int, step: int, apart: int) -> None:
    for j in range(pairs):
        i = at + j * step
        a, b = x[i], x[i + apart]
        cos, sin = table[cos_at + j], table[sin_at + j]
        x[i] = a * cos - b * sin
        x[i + apart] = b * cos + a * sin


@njit(cache=True)
def _heads(
    x: Any, heads: int, width: int, weight: Any, eps: float, table: Any, length: int, pairs: int,
    adjacent: bool, row: int, position: int,
) -> None:  # fmt: skip
    # x (M * heads * D,): all heads of one row; weight (D,), or (0,) for no norm
    step = 2 if adjacent else 1
    apart = 1 if adjacent else pairs
    for head in range(heads):
        at = (row * heads + head) * width
        if weight.size > 0:
            norm_row(x, at, weight, width, eps, x, at, False)
        _rotate(x, at, table, position * pairs, (length + position) * pairs, pairs, step, apart)


@njit(cache=True)
def qk_norm_rope_part(
    q: Any, k: Any, q_heads: int, k_heads: int, width: int, q_norm: Any, k_norm: Any, eps: float, positions: Any,
    table: Any, length: int, pairs: int, adjacent: bool, thread: int, n_threads: int,
) -> None:  # fmt: skip
    # q (M * H * D,), k (M * G * D,), norms (D,) or (0,), positions (M,), table (2 * length * n,)
    rows = positions.size
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        position = int(positions[row])
        _heads(q, q_heads, width, q_norm, eps, table, length, pairs, adjacent, row, position)
        _heads(k, k_heads, width, k_norm, eps, table, length, pairs, adjacent, row, position)
