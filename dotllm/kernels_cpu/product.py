"""The kernel behind `matmul` for interleaved weights: one per format, for matrices and stacks of experts alike.

Work is a list of segments, each some input rows that meet one expert's matrix (a plain product has expert 0 only), and
of groups of sixteen output rows; threads share out (segment, group) pairs, never a sum:

    segment s: pairs starts[s] .. starts[s + 1]; pair p reads row sources[p] of x and writes row targets[p] of out
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, prange

from dotllm.kernels_cpu.lanes import lane16, load16, store16
from dotllm.kernels_cpu.micro import block_bytes, tile

__all__ = ["interleaved_product"]


@njit(cache=True)
def _finish(v: Any, out: Any, at: int, first: int, width: int, bias: Any, add: bool) -> None:
    """out[at + first ..] = v, plus bias, plus what is there with `add`; only `width` columns exist."""
    if first + 16 <= width:
        if bias.size > 0:
            v = v + load16(bias, first)
        if add:
            v = load16(out, at + first) + v
        store16(out, at + first, v)
        return
    for i in range(width - first):
        y = lane16(v, i)
        if bias.size > 0:
            y = y + bias[first + i]
        out[at + first + i] = out[at + first + i] + y if add else y


@cache
def interleaved_product(format: str, isa: str) -> Any:
    """The compiled product of R16 weights of `format`; a closure over two strings, so that Numba can cache it."""

    @njit(cache=True, parallel=True)
    def product(
        weights: Any,  # u8 flat: experts x groups x blocks x block_bytes
        blocks: int,
        values: Any,  # of the rounded activations: int8, f32, i32, f32, all flat
        scales: Any,
        sums: Any,
        offsets: Any,
        starts: Any,  # i32 (segments + 1,)
        experts: Any,  # i32 (segments,)
        sources: Any,  # i32 (pairs,)
        targets: Any,
        out: Any,  # f32 flat: rows x width
        width: int,
        bias: Any,  # f32 (width,) or empty
        add: bool,
        threads: int,
    ) -> None:
        groups = (width + 15) // 16
        items = (starts.size - 1) * groups
        for thread in prange(threads):
            for item in range(items * thread // threads, items * (thread + 1) // threads):
                segment, group = item // groups, item % groups
                at = (experts[segment] * groups + group) * blocks * block_bytes(format)
                pair, stop = starts[segment], starts[segment + 1]
                while pair + 4 <= stop:
                    rows = (sources[pair], sources[pair + 1], sources[pair + 2], sources[pair + 3])
                    y4 = tile(format, isa, 4, weights, at, blocks, values, scales, sums, offsets, rows)
                    for t in range(4):
                        _finish(y4[t], out, targets[pair + t] * width, 16 * group, width, bias, add)
                    pair += 4
                if pair + 2 <= stop:
                    two = (sources[pair], sources[pair + 1])
                    y2 = tile(format, isa, 2, weights, at, blocks, values, scales, sums, offsets, two)
                    for t in range(2):
                        _finish(y2[t], out, targets[pair + t] * width, 16 * group, width, bias, add)
                    pair += 2
                if pair < stop:
                    one = (sources[pair],)
                    y1 = tile(format, isa, 1, weights, at, blocks, values, scales, sums, offsets, one)
                    _finish(y1[0], out, targets[pair] * width, 16 * group, width, bias, add)

    return product
