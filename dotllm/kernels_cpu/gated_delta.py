"""The gated delta rule: one pass over the recurrent state for any number of rows.

S = exp(g) S;   d = b (v - S k);   S = S + d k^T;   o = S q / sqrt(Dk)          for each row of the sequence

state (planes, HV, Dv, Dk), flat                        one unit of work: 16 rows of one head of one sequence
plane read[s]   head h  | Dk values |  value row j      (16 * Dk floats, 8 KB at Dk = 128: stays in L1)
                        | Dk values |  value row j + 1
The first batch row takes S from plane read[s] and leaves it in plane write[s]; the others stay there, in cache.
S k and S q run along the contiguous axis: lane l adds k[l], k[l + 16], ..., then the lanes are folded.
Value rows are independent of each other, so units may run on any thread; four at a time hide the FMA latency.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dotllm.kernels_cpu.lanes import fma16, load16, splat16, store16, sum16, zero16
from dotllm.kernels_cpu.mathfun import exp

__all__ = ["TILE", "gated_delta_part"]

TILE = 16


@njit(cache=True)
def _write_two(
    q: Any, k: Any, key_at: int, width: int, decay: Any, d0: Any, d1: Any, scale: Any,
    state: Any, source: int, target: int, out: Any, v_at: int,
) -> None:  # fmt: skip
    # S + d k^T for two value rows, and their outputs
    decays, w0, w1 = splat16(decay), splat16(d0), splat16(d1)
    a0, a1 = zero16(), zero16()
    for i in range(0, width, 16):
        key, query = load16(k, key_at + i), load16(q, key_at + i)
        s0 = fma16(w0, key, load16(state, source + i) * decays)
        s1 = fma16(w1, key, load16(state, source + width + i) * decays)
        store16(state, target + i, s0)
        store16(state, target + width + i, s1)
        a0, a1 = fma16(s0, query, a0), fma16(s1, query, a1)
    out[v_at] = sum16(a0) * scale
    out[v_at + 1] = sum16(a1) * scale


@njit(cache=True)
def _four_rows(
    q: Any, k: Any, key_at: int, width: int, v: Any, v_at: int, decay: Any, beta: Any, scale: Any,
    state: Any, source: int, target: int, out: Any,
) -> None:  # fmt: skip
    # four value rows of one head, for one batch row; `source` and `target` are where their states begin
    decays = splat16(decay)
    a0, a1, a2, a3 = zero16(), zero16(), zero16(), zero16()
    for i in range(0, width, 16):
        key, at = load16(k, key_at + i), source + i
        a0 = fma16(load16(state, at) * decays, key, a0)
        a1 = fma16(load16(state, at + width) * decays, key, a1)
        a2 = fma16(load16(state, at + 2 * width) * decays, key, a2)
        a3 = fma16(load16(state, at + 3 * width) * decays, key, a3)
    d0 = beta * (v[v_at] - sum16(a0))
    d1 = beta * (v[v_at + 1] - sum16(a1))
    d2 = beta * (v[v_at + 2] - sum16(a2))
    d3 = beta * (v[v_at + 3] - sum16(a3))
    _write_two(q, k, key_at, width, decay, d0, d1, scale, state, source, target, out, v_at)
    at = 2 * width
    _write_two(q, k, key_at, width, decay, d2, d3, scale, state, source + at, target + at, out, v_at + 2)


@njit(cache=True)
def gated_delta_part(
    q: Any, k: Any, v: Any, g: Any, b: Any, key_head: Any, state: Any, starts: Any, read: Any, write: Any, out: Any,
    key_heads: int, key_width: int, value_width: int, scale: float, thread: int, n_threads: int,
) -> None:  # fmt: skip
    # q, k (M * HK * Dk,), v, out (M * HV * Dv,), g, b (M * HV,), key_head (HV,), state (planes * HV * Dv * Dk,)
    heads = key_head.size
    tiles = value_width // TILE
    units = read.size * heads * tiles
    factor = np.float32(scale)
    for unit in range(units * thread // n_threads, units * (thread + 1) // n_threads):
        s, head, tile = unit // (heads * tiles), unit // tiles % heads, unit % tiles
        source = ((int(read[s]) * heads + head) * value_width + tile * TILE) * key_width
        target = ((int(write[s]) * heads + head) * value_width + tile * TILE) * key_width
        for row in range(int(starts[s]), int(starts[s + 1])):
            key_at = (row * key_heads + int(key_head[head])) * key_width
            v_at = (row * heads + head) * value_width + tile * TILE
            decay, beta = exp(g[row * heads + head]), b[row * heads + head]
            for j in range(0, TILE, 4):
                at = j * key_width
                _four_rows(
                    q, k, key_at, key_width, v, v_at + j, decay, beta, factor, state, source + at, target + at, out
                )  # fmt: skip
            source = target
