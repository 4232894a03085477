"""Causal attention over a paged cache: an online softmax that walks pages at absolute positions.

m' = max(m, max_j s_j);  p_j = exp(s_j - m');  l = l exp(m - m') + sum p_j;  acc = acc exp(m - m') + sum p_j v_j
out = acc / l  (times sigmoid(gate)),   s_j = (scale q) . k_j

cache (pages, G, PAGE, D), flat        | page: head 0 | slot 0: D values | slot 1 | .. slot 31 |  head 1 | ...
position p of sequence s               page pages[s, p // PAGE], slot p % PAGE
a unit of work                         some query heads of one batch row that read one key/value head
scratch of one thread                  | scaled q | acc | scores (PAGE) | m | l | keys | values |
                                        heads * P   heads * P  heads each          PAGE * P each, P = D rounded up to 16
A tile is a page whatever the batch looks like, so a row's sums do not depend on how its prompt was cut. Float16
caches, and widths that are no multiple of 16, are unpacked (padded with zeros) to the scratch tile, once a tile
for all heads of the unit; after that there is one path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dotllm.kernels_cpu.lanes import (
    div,
    float_to_half,
    fma16,
    half_to_float,
    load16,
    load16_half,
    max16,
    maximum,
    peak16,
    splat16,
    store16,
    store16_half,
    sum16,
    zero16,
)
from dotllm.kernels_cpu.mathfun import exp, sigmoid
from dotllm.ops.protocol import PAGE

__all__ = ["attention_part", "kv_store_part", "scratch_size"]

LOW = -1.0e30
"""Score of a slot that is not attended: exp(LOW - m) is zero."""


def scratch_size(queries: int, width: int) -> int:
    """Float32 values of scratch that one thread needs for units of that many queries (rows x heads)."""
    padded = -(-width // 16) * 16
    return queries * (2 * padded + PAGE + 2) + 2 * PAGE * padded


@njit(cache=True)
def _unpack(full: Any, half: Any, at: int, first: int, last: int, width: int, padded: int, out: Any, to: int) -> None:
    # slots first .. last of one tile, float32 (`full`) or float16 bits (`half`), to rows of `padded` floats
    for slot in range(first, last):
        source, target = at + slot * width, to + slot * padded
        if half.size > 0:
            whole = width - width % 16
            for i in range(0, whole, 16):
                store16(out, target + i, load16_half(half, source + i))
            for i in range(whole, width):
                out[target + i] = half_to_float(half[source + i])
        else:
            for i in range(width):
                out[target + i] = full[source + i]
        for i in range(width, padded):
            out[target + i] = np.float32(0.0)


@njit(cache=True)
def _scores(x: Any, q_at: int, keys: Any, k_at: int, width: int, first: int, last: int, scores_at: int) -> None:
    # x is the scratch; each score is one chain over the width, four scores at a time hide the FMA latency
    store16(x, scores_at, splat16(np.float32(LOW)))
    store16(x, scores_at + 16, splat16(np.float32(LOW)))
    whole = first + (last - first) // 4 * 4
    for slot in range(first, whole, 4):
        at = k_at + slot * width
        a0, a1, a2, a3 = zero16(), zero16(), zero16(), zero16()
        for i in range(0, width, 16):
            query = load16(x, q_at + i)
            a0 = fma16(query, load16(keys, at + i), a0)
            a1 = fma16(query, load16(keys, at + width + i), a1)
            a2 = fma16(query, load16(keys, at + 2 * width + i), a2)
            a3 = fma16(query, load16(keys, at + 3 * width + i), a3)
        x[scores_at + slot], x[scores_at + slot + 1] = sum16(a0), sum16(a1)
        x[scores_at + slot + 2], x[scores_at + slot + 3] = sum16(a2), sum16(a3)
    for slot in range(whole, last):
        a0 = zero16()
        for i in range(0, width, 16):
            a0 = fma16(load16(x, q_at + i), load16(keys, k_at + slot * width + i), a0)
        x[scores_at + slot] = sum16(a0)


@njit(cache=True)
def _soften(x: Any, scores_at: int, m_at: int, l_at: int) -> Any:
    # scores become weights; returns the factor for what was summed so far
    s0, s1 = load16(x, scores_at), load16(x, scores_at + 16)
    before = x[m_at]
    peak = maximum(before, peak16(max16(s0, s1)))
    p0, p1 = exp(s0 - splat16(peak)), exp(s1 - splat16(peak))
    store16(x, scores_at, p0)
    store16(x, scores_at + 16, p1)
    factor = exp(before - peak)
    x[m_at] = peak
    x[l_at] = x[l_at] * factor + sum16(p0 + p1)
    return factor


@njit(cache=True)
def _mix(
    x: Any, acc_at: int, factor: Any, scores_at: int, values: Any, v_at: int, width: int, first: int, last: int
) -> None:
    # acc = acc * factor + sum over slots, in order; the grouping of columns does not touch their values
    factors = splat16(factor)
    whole = width - width % 64
    for i in range(0, whole, 64):
        at = acc_at + i
        a0, a1 = load16(x, at) * factors, load16(x, at + 16) * factors
        a2, a3 = load16(x, at + 32) * factors, load16(x, at + 48) * factors
        for slot in range(first, last):
            p, value = splat16(x[scores_at + slot]), v_at + slot * width + i
            a0 = fma16(p, load16(values, value), a0)
            a1 = fma16(p, load16(values, value + 16), a1)
            a2 = fma16(p, load16(values, value + 32), a2)
            a3 = fma16(p, load16(values, value + 48), a3)
        store16(x, at, a0)
        store16(x, at + 16, a1)
        store16(x, at + 32, a2)
        store16(x, at + 48, a3)
    for i in range(whole, width, 16):
        a0 = load16(x, acc_at + i) * factors
        for slot in range(first, last):
            a0 = fma16(splat16(x[scores_at + slot]), load16(values, v_at + slot * width + i), a0)
        store16(x, acc_at + i, a0)


@njit(cache=True)
def _begin(
    q: Any, q_at: int, width: int, padded: int, scale: float, x: Any, x_at: int, acc_at: int, m_at: int, queries: int
) -> None:
    # the scaled query, padded; empty sums
    factor = np.float32(scale)
    for i in range(width):
        x[x_at + i] = q[q_at + i] * factor
    for i in range(width, padded):
        x[x_at + i] = np.float32(0.0)
    for i in range(0, padded, 16):
        store16(x, acc_at + i, zero16())
    x[m_at] = np.float32(LOW)
    x[m_at + queries] = np.float32(0.0)


@njit(cache=True)
def _finish(x: Any, q_at: int, acc_at: int, total: Any, gate: Any, out: Any, to: int, width: int, padded: int) -> None:
    # gate (M * H * D,) or (0,); it takes the place of the query, so that widths of any size share one path
    share = splat16(div(np.float32(1.0), total))
    if gate.size > 0:
        for i in range(width):
            x[q_at + i] = gate[to + i]
    for i in range(0, padded, 16):
        y = load16(x, acc_at + i) * share
        if gate.size > 0:
            y = y * sigmoid(load16(x, q_at + i))
        store16(x, acc_at + i, y)
    for i in range(width):
        out[to + i] = x[acc_at + i]


@njit(cache=True)
def _span(position: int, window: int, tile: int) -> Any:
    # the slots first .. last of a tile that a row at `position` attends; first >= last where there are none
    start = max(0, position - window + 1) if window > 0 else 0
    return max(start - tile * PAGE, 0), min(position + 1 - tile * PAGE, PAGE)


@njit(cache=True)
def _run(
    q: Any, k: Any, v: Any, k_half: Any, v_half: Any, gate: Any, pages: Any, positions: Any, sequence: int,
    row: int, stop: int, first_head: int, q_heads: int, kv_head: int, kv_heads: int, heads: int, width: int,
    scale: float, window: int, x: Any, x_at: int, out: Any,
) -> None:  # fmt: skip
    # rows row .. stop of one sequence, `heads` query heads from first_head on: each pair is a query with own sums
    padded = (width + 15) // 16 * 16
    queries = (stop - row) * heads
    acc_at = x_at + queries * padded
    scores_at = acc_at + queries * padded
    m_at = scores_at + queries * PAGE
    k_tile = m_at + 2 * queries
    v_tile = k_tile + PAGE * padded
    unpacked = k_half.size > 0 or padded != width
    keys, values = (x, x) if unpacked else (k, v)
    earliest, latest = int(positions[row]), int(positions[stop - 1])
    for i in range(queries):
        q_at = ((row + i // heads) * q_heads + first_head + i % heads) * width
        _begin(q, q_at, width, padded, scale, x, x_at + i * padded, acc_at + i * padded, m_at + i, queries)
    start = max(0, earliest - window + 1) if window > 0 else 0
    for tile in range(start // PAGE, latest // PAGE + 1):
        at = (int(pages[sequence, tile]) * kv_heads + kv_head) * PAGE * width
        k_at, v_at = at, at
        if unpacked:
            k_at, v_at = k_tile, v_tile
            first, last = _span(earliest, window, tile)[0], _span(latest, window, tile)[1]
            _unpack(k, k_half, at, first, last, width, padded, x, k_tile)
            _unpack(v, v_half, at, first, last, width, padded, x, v_tile)
        for i in range(queries):
            first, last = _span(int(positions[row + i // heads]), window, tile)
            if first < last:
                scores = scores_at + i * PAGE
                _scores(x, x_at + i * padded, keys, k_at, padded, first, last, scores)
                factor = _soften(x, scores, m_at + i, m_at + queries + i)
                _mix(x, acc_at + i * padded, factor, scores, values, v_at, padded, first, last)
    for i in range(queries):
        q_at = ((row + i // heads) * q_heads + first_head + i % heads) * width
        total = x[m_at + queries + i]
        _finish(x, x_at + i * padded, acc_at + i * padded, total, gate, out, q_at, width, padded)


@njit(cache=True)
def attention_part(
    q: Any, k: Any, v: Any, k_half: Any, v_half: Any, gate: Any, pages: Any, sequence: Any, positions: Any,
    q_heads: int, kv_heads: int, rows: int, heads: int, width: int, scale: float, window: int, x: Any, out: Any,
    thread: int, n_threads: int,
) -> None:  # fmt: skip
    # q, out (M * H * D,), gate the same or (0,); k, v (pages * G * PAGE * D,) or (0,), k_half, v_half likewise;
    # pages (S, P), sequence, positions (M,); a unit: at most `rows` batch rows, `heads` query heads (divides H / G);
    # x scratch (n_threads * size,)
    per_row = q_heads // heads
    x_at = thread * (x.size // n_threads)
    count = positions.size
    blocks = (count + rows - 1) // rows
    # later rows see more: units are dealt out like cards, which keeps the threads level
    for unit in range(thread, blocks * per_row, n_threads):
        first_head = unit % per_row * heads
        row, end = unit // per_row * rows, min(unit // per_row * rows + rows, count)
        while row < end:
            stop = row + 1
            while stop < end and sequence[stop] == sequence[row]:
                stop += 1
            _run(
                q, k, v, k_half, v_half, gate, pages, positions, int(sequence[row]), row, stop, first_head, q_heads,
                first_head // (q_heads // kv_heads), kv_heads, heads, width, scale, window, x, x_at, out,
            )  # fmt: skip
            row = stop


@njit(cache=True)
def kv_store_part(
    new: Any, full: Any, half: Any, pages: Any, sequence: Any, positions: Any, kv_heads: int, width: int,
    thread: int, n_threads: int,
) -> None:  # fmt: skip
    # new (M * G * D,); the cache (pages * G * PAGE * D,) in `full`, or as float16 bits in `half`; the other is (0,)
    whole = width - width % 16
    for row in range(positions.size * thread // n_threads, positions.size * (thread + 1) // n_threads):
        page, slot = int(pages[sequence[row], positions[row] // PAGE]), int(positions[row]) % PAGE
        for head in range(kv_heads):
            source = (row * kv_heads + head) * width
            target = ((page * kv_heads + head) * PAGE + slot) * width
            for i in range(0, whole, 16):
                if half.size > 0:
                    store16_half(half, target + i, load16(new, source + i))
                else:
                    store16(full, target + i, load16(new, source + i))
            for i in range(whole, width):
                if half.size > 0:
                    half[target + i] = float_to_half(new[source + i])
                else:
                    full[target + i] = new[source + i]
