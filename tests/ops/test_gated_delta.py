"""The recurrent layer: any cut of a sequence gives the same outputs and the same state, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from op_cases import floats, i32, rows_of, slice_rows

from dotllm.kernels_cpu.backend import CpuOps


def delta(ops: CpuOps, size: int, count: int, cuts: list[int], *, in_place: bool = False) -> tuple[Any, Any]:
    """Outputs and final state of `count` rows in pieces that end at `cuts`; planes take turns, or stay in place."""
    heads, values = 2, 4
    q, k = (floats(s, count, heads, size, scale=size**-0.5) for s in (1, 2))
    v, g, b = floats(3, count, values, size), -np.abs(floats(4, count, values)), np.abs(floats(5, count, values)) * 0.3
    state, out = floats(6, 2, values, size, size), np.empty((count, values, size), np.float32)
    rows, begin, plane = rows_of([count], [0]), 0, 0
    for end in cuts:
        part, target = slice(begin, end), plane if in_place else 1 - plane
        piece = dataclasses.replace(slice_rows(rows, begin, end), read=i32(plane), write=i32(target))
        before = state[plane].copy()
        ops.gated_delta(q[part], k[part], v[part], g[part], b[part], i32(0, 1, 1, 0), state, piece, out[part])
        if not in_place:
            assert np.array_equal(state[plane], before)
        begin, plane = end, target
    return out, state[plane]


@pytest.mark.parametrize("size", [16, 64, 128])
def test_the_recurrence_may_be_cut_anywhere(size: int) -> None:
    count = 9
    whole, state = delta(CpuOps(1), size, count, [count])
    for ops in (CpuOps(1), CpuOps(2, least_work=0)):
        for in_place in (False, True):
            for cuts in ([count], [4, count], list(range(1, count + 1))):
                out, last = delta(ops, size, count, cuts, in_place=in_place)
                assert np.array_equal(out, whole)
                assert np.array_equal(last, state)


def convolve(ops: CpuOps, taps: int, count: int, cuts: list[int], *, in_place: bool) -> list[Any]:
    size, heads, values = 32, 2, 3
    width = (2 * heads + values) * size
    u, weights, window = floats(1, count, width), floats(2, width, taps), floats(3, 2, taps - 1, width)
    q, k, v = (np.empty((count, n, size), np.float32) for n in (heads, heads, values))
    rows, begin, plane = rows_of([count], [0]), 0, 0
    for end in cuts:
        part, target = slice(begin, end), plane if in_place else 1 - plane
        piece = dataclasses.replace(slice_rows(rows, begin, end), read=i32(plane), write=i32(target))
        ops.conv_silu_l2(u[part], weights, window, piece, 1e-6, q[part], k[part], v[part])
        begin, plane = end, target
    return [q, k, v, window[plane]]


@pytest.mark.parametrize("taps", [2, 3, 4, 8])
def test_the_convolution_may_be_cut_anywhere(taps: int) -> None:
    count = 12
    whole = convolve(CpuOps(1), taps, count, [count], in_place=False)
    for ops in (CpuOps(1), CpuOps(2, least_work=0)):
        for in_place in (False, True):
            for cuts in ([count], [1, 3, 8, count], list(range(1, count + 1))):
                found = convolve(ops, taps, count, cuts, in_place=in_place)
                assert all(np.array_equal(a, b) for a, b in zip(found, whole, strict=True))


def test_sequences_of_a_batch_do_not_meet() -> None:
    ops, lengths = CpuOps(2, least_work=0), [3, 1, 4]
    rows = rows_of(lengths, [0, 0, 0])
    q, k, v = floats(1, 8, 2, 16), floats(2, 8, 2, 16, scale=0.2), floats(3, 8, 2, 16)
    g, b, state = -np.abs(floats(4, 8, 2)), np.abs(floats(5, 8, 2)), floats(6, 6, 2, 16, 16)
    whole, together = np.empty_like(v), state.copy()
    ops.gated_delta(q, k, v, g, b, i32(0, 1), together, rows, whole)
    for s, (begin, end) in enumerate(zip(rows.starts[:-1], rows.starts[1:], strict=True)):
        part, alone = slice(begin, end), state.copy()
        one = dataclasses.replace(slice_rows(rows, begin, end), read=rows.read[s : s + 1], write=rows.write[s : s + 1])
        out = np.empty_like(v[part])
        ops.gated_delta(q[part], k[part], v[part], g[part], b[part], i32(0, 1), alone, one, out)
        assert np.array_equal(out, whole[part])
        assert np.array_equal(alone[rows.write[s]], together[rows.write[s]])
