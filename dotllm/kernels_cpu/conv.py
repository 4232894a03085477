"""Causal depthwise convolution over time, SiLU, and the l2 norm of query and key heads: one pass.

c_t = silu(sum_j taps[:, j] * u[t - (C - 1) + j]);   q, k = c / sqrt(sum(c^2) + eps) per head;   v = c

channels of u   | HK query heads | HK key heads | HV value heads |      a unit of work: one head of one sequence
time            window of plane read[s]: C - 1 rows | rows of the batch: starts[s] .. starts[s + 1]
                the last C - 1 rows of the two together become the window of plane write[s]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dotllm.kernels_cpu.lanes import div, fma16, load16, splat16, sqrt, store16, zero16
from dotllm.kernels_cpu.mathfun import silu
from dotllm.kernels_cpu.norm import sum_squares

__all__ = ["conv_silu_l2_part"]


@njit(cache=True)
def _convolve_row(
    u: Any, window: Any, window_at: int, taps: Any, taps_at: int, count: int, width: int, head_at: int, size: int,
    start: int, step: int, out: Any, out_at: int,
) -> None:  # fmt: skip
    # batch row start + step of the sequence, channels head_at .. head_at + size; taps as (count, size) at taps_at
    for i in range(0, size, 16):
        total = zero16()
        for j in range(count):
            time = step + j - (count - 1)
            if time < 0:
                value = load16(window, window_at + (step + j) * width + head_at + i)
            else:
                value = load16(u, (start + time) * width + head_at + i)
            total = fma16(load16(taps, taps_at + j * size + i), value, total)
        store16(out, out_at + i, silu(total))


@njit(cache=True)
def _normalise(x: Any, at: int, size: int, eps: float) -> None:
    factor = splat16(div(np.float32(1.0), sqrt(sum_squares(x, at, size) + np.float32(eps))))
    for i in range(at, at + size, 16):
        store16(x, i, load16(x, i) * factor)


@njit(cache=True)
def _shift_window(
    u: Any, window: Any, source: int, target: int, before: int, width: int, start: int, n: int, head_at: int, size: int
) -> None:
    # rows ascend, so a window may be shifted onto itself
    for i in range(before):
        for c in range(head_at, head_at + size, 16):
            if i + n < before:
                value = load16(window, source + (i + n) * width + c)
            else:
                value = load16(u, (start + i + n - before) * width + c)
            store16(window, target + i * width + c, value)


@njit(cache=True)
def conv_silu_l2_part(
    u: Any, taps: Any, window: Any, starts: Any, read: Any, write: Any, eps: float, q: Any, k: Any, v: Any,
    count: int, key_heads: int, size: int, scratch: Any, thread: int, n_threads: int,
) -> None:  # fmt: skip
    # u (M * W,), taps (W * C,), window (planes * (C - 1) * W,), q, k (M * HK * D,), v (M * HV * D,)
    # scratch (n_threads * C * D,): the taps of one head, transposed so that lanes run over channels
    width = taps.size // count
    heads = width // size
    value_heads = heads - 2 * key_heads
    plane = (count - 1) * width
    taps_at = thread * count * size
    units = read.size * heads
    for unit in range(units * thread // n_threads, units * (thread + 1) // n_threads):
        s, head = unit // heads, unit % heads
        head_at, start, n = head * size, int(starts[s]), int(starts[s + 1]) - int(starts[s])
        source, target = int(read[s]) * plane, int(write[s]) * plane
        for i in range(size):
            for j in range(count):
                scratch[taps_at + j * size + i] = taps[(head_at + i) * count + j]
        for step in range(n):
            row = start + step
            if head < key_heads:
                out, at = q, (row * key_heads + head) * size
            elif head < 2 * key_heads:
                out, at = k, (row * key_heads + head - key_heads) * size
            else:
                out, at = v, (row * value_heads + head - 2 * key_heads) * size
            _convolve_row(
                u, window, source, scratch, taps_at, count, width, head_at, size, start, step, out, at
            )  # fmt: skip
            if head < 2 * key_heads:
                _normalise(out, at, size, eps)
        _shift_window(u, window, source, target, count - 1, width, start, n, head_at, size)
