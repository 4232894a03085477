"""The kernel behind `matmul` for interleaved weights: one per format, for matrices and stacks of experts alike.

Work is a list of segments, each some input rows that meet one expert's matrix (a plain product has expert 0 only), and
of groups of sixteen output rows; parts share out (segment, group) pairs, never a sum:

    segment s: pairs starts[s] .. starts[s + 1]; pair p reads row sources[p] of x and writes row targets[p] of out

A product is called by its address (`program`): linked into another function it would be optimised once more there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, types

from dotllm.kernels_cpu.executor import name_closure
from dotllm.kernels_cpu.lanes import lane16, load16, store16
from dotllm.kernels_cpu.micro import block_bytes, tile

__all__ = ["ARGUMENTS", "compile_product", "interleaved_product", "share"]

_I32 = types.Array(types.int32, 1, "C")
_F32 = types.Array(types.float32, 1, "C")

ARGUMENTS = (
    types.Array(types.uint8, 1, "C"),  # weights: experts x groups x blocks x block_bytes
    types.int64,  # blocks in a row
    types.Tuple((types.Array(types.int8, 1, "C"), _F32, _I32, _F32)),  # x: values, scales, sums, offsets
    types.UniTuple(_I32, 4),  # work: starts, experts, sources, targets
    _F32,  # out: rows x width
    types.int64,  # width
    _F32,  # bias (width,), or empty
    types.boolean,  # add to out
    types.int64,  # part
    types.int64,  # of so many parts
)


@njit(cache=True)
def share(starts: Any, width: int, part: int, parts: int) -> Any:
    """The items first .. last of a part; item = segment * groups + group."""
    items = (starts.size - 1) * ((width + 15) // 16)
    return items * part // parts, items * (part + 1) // parts


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


def compile_product(function: Any, name: str) -> Any:
    """A product as a cached kernel, under a name of its own."""
    name_closure(function, f"product_{name}")
    return njit([types.void(*ARGUMENTS)], cache=True)(function)


@cache
def interleaved_product(format: str, isa: str) -> Any:
    """The product of R16 weights of `format`, one of its parts; arguments as above.

    A closure over two strings only, so that Numba can keep it on disk.
    """

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
        values, scales, sums, offsets = x
        starts, experts, sources, targets = work
        groups = (width + 15) // 16
        first, last = share(starts, width, part, parts)
        for item in range(first, last):
            segment, group = item // groups, item % groups
            at = (experts[segment] * groups + group) * blocks * block_bytes(format)
            pair, stop = starts[segment], starts[segment + 1]
            while pair + 4 <= stop:
                four = (sources[pair], sources[pair + 1], sources[pair + 2], sources[pair + 3])
                y4 = tile(format, isa, 4, weights, at, blocks, values, scales, sums, offsets, four)
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

    return compile_product(product, f"{format}_{isa}")
