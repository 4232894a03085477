"""Attention over pages: a row's value depends on its history alone, not on how rows were put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import floats, i32, rows_of, slice_rows

from dotllm.kernels_cpu.backend import CpuOps
from dotllm.ops.protocol import PAGE, KvLayer, Rows


def attend(ops: CpuOps, q: Any, k: Any, v: Any, gate: Any, dtype: str, window: int, cuts: list[int]) -> Any:
    """A prompt of len(q) rows, stored and attended in pieces that end at `cuts`."""
    count, _, width = q.shape
    kv = KvLayer(*(ops.zeros((8, k.shape[1], PAGE, width), dtype) for _ in range(2)))
    for cache in (kv.k, kv.v):
        cache[...] = 0x7C00 if dtype == "f16" else np.inf  # slots that are not yet written must not matter
    out, begin, rows = np.empty_like(q), 0, rows_of([count], [0])
    for end in cuts:
        piece = slice_rows(rows, begin, end)
        part = slice(begin, end)
        ops.kv_store(kv, piece, k[part], v[part])
        ops.attention(q[part], kv, piece, 0.2, window, None if gate is None else gate[part], out[part])
        begin = end
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "window", "gated"),
    [
        (4, 2, 64, "f32", 0, True),
        (6, 2, 32, "f16", 0, False),
        (3, 3, 40, "f32", 17, False),
        (2, 1, 16, "f16", 33, True),
    ],
)
def test_a_prompt_may_be_cut_anywhere(
    heads: int, kv_heads: int, width: int, dtype: str, window: int, gated: bool
) -> None:
    count = 75
    q, k, v = floats(1, count, heads, width), floats(2, count, kv_heads, width), floats(3, count, kv_heads, width)
    gate = floats(4, count, heads, width) if gated else None
    whole = attend(CpuOps(1), q, k, v, gate, dtype, window, [count])
    for ops in (CpuOps(1), CpuOps(2, least_work=0)):
        for cuts in ([count], [1, 31, 32, 33, 70, count], list(range(1, count + 1))):
            assert np.array_equal(attend(ops, q, k, v, gate, dtype, window, cuts), whole)


def test_a_row_does_not_see_its_neighbours() -> None:
    ops, count = CpuOps(1), 40
    rows = rows_of([count, count], [0, 0])
    kv = KvLayer(*(ops.zeros((16, 1, PAGE, 32)) for _ in range(2)))
    k, v, q = floats(1, 2 * count, 1, 32), floats(2, 2 * count, 1, 32), floats(3, 2 * count, 3, 32)
    ops.kv_store(kv, rows, k, v)
    whole = np.empty_like(q)
    ops.attention(q, kv, rows, 0.2, 0, None, whole)
    for r in (0, 31, 39, 40, 79):
        one, out = slice(r, r + 1), np.empty((1, 3, 32), np.float32)
        alone = Rows(i32(0, 1), rows.sequence[one], rows.positions[one], rows.pages, rows.read, rows.write)
        ops.attention(q[one], kv, alone, 0.2, 0, None, out)
        assert np.array_equal(out, whole[one])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    ops, count = CpuOps(1), 40
    k = np.zeros((count, 1, 16), np.float32)
    k[:, 0, 0] = np.linspace(-3e4, 3e4, count)
    v, q = floats(2, count, 1, 16), np.ones((count, 1, 16), np.float32)
    out = attend(ops, q, k, v, None, "f32", 0, [count])
    np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6)  # the last key wins each time


def test_only_the_batch_is_stored() -> None:
    ops = CpuOps(1)
    kv = KvLayer(*(ops.zeros((4, 2, PAGE, 16), "f16") for _ in range(2)))
    rows = Rows(i32(0, 2), i32(0, 0), i32(31, 32), i32(2, 0).reshape(1, 2), i32(0), i32(1))
    ops.kv_store(kv, rows, floats(1, 2, 2, 16), floats(2, 2, 2, 16))
    expected = np.zeros((4, 2, PAGE, 16), np.uint16)
    expected[2, :, 31], expected[0, :, 0] = floats(1, 2, 2, 16).astype(np.float16).view(np.uint16)
    assert np.array_equal(kv.k, expected)
