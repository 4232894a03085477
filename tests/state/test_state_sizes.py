"""The block pool, the layout of a model's state, and how many bytes it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from state_toy import HYBRID

from dotllm.errors import OutOfMemory, StateError
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile
from dotllm.ops.protocol import PAGE
from dotllm.ops.reference import NumpyOps
from dotllm.state.blocks import BlockPool, pages_for
from dotllm.state.layout import KvShape, StateBytes, StateLayout
from dotllm.state.manager import Extend, StateManager


# ---- block pool
def test_pages_for() -> None:
    assert [pages_for(n) for n in (0, 1, PAGE - 1, PAGE, PAGE + 1, 10 * PAGE)] == [0, 1, 1, 1, 2, 10]


def test_pool_counts_references() -> None:
    pool = BlockPool(4, "pool")
    first = pool.take(3)
    assert (pool.free, pool.used, len(set(first))) == (1, 3, 3)
    assert pool.take(0) == ()
    pool.share(first[:2])
    assert [pool.shared(p) for p in first] == [True, True, False]
    pool.release(first)
    assert (pool.free, [pool.references(p) for p in first]) == (2, [1, 1, 0])
    pool.release(first[:2])
    assert pool.free == 4


def test_pool_refuses_without_change() -> None:
    pool = BlockPool(2, "the pool")
    pool.take(1)
    with pytest.raises(OutOfMemory, match="the pool: 2 pages of 32 positions are needed and 1 of 2 are free"):
        pool.take(2)
    assert pool.free == 1
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(StateError, match="is free already"):
        pool.release([page])
    with pytest.raises(StateError, match="cannot be shared"):
        pool.share([page])
    with pytest.raises(StateError, match="at least 1"):
        BlockPool(0, "pool")


def test_pool_recounts_from_tables() -> None:
    pool = BlockPool(5, "pool")
    pool.take(4)
    pool.recount([[1, 3], [3]])
    assert [pool.references(p) for p in range(5)] == [0, 1, 0, 2, 0]
    assert sorted(pool.take(3)) == [0, 2, 4]


# ---- layout and sizes
def test_layout_of_a_hybrid_model(tiny_gguf: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_gguf("qwen35")) as file:
        config = ModelConfig.from_gguf(file)
    layout, recurrent = StateLayout.of(config), config.recurrent
    assert recurrent is not None
    assert layout.recurrent is not None
    assert config.mtp is not None
    kinds = [layer.kind for layer in config.layers]
    assert (len(layout.kv), layout.recurrent_layers) == (kinds.count("attention"), kinds.count("recurrent"))
    assert layout.index == tuple(kinds[:i].count(kind) for i, kind in enumerate(kinds))
    assert layout.mtp == KvShape(config.mtp.kv_heads, config.head_dim)
    assert layout.recurrent.channels == recurrent.conv_width
    assert layout.recurrent.key_head == tuple(h % recurrent.k_heads for h in range(recurrent.v_heads))


def test_layout_of_other_families(tiny_gguf: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_gguf("llama")) as file:
        layout = StateLayout.of(ModelConfig.from_gguf(file))
    assert (layout.recurrent, layout.recurrent_layers, layout.mtp) == (None, 0, None)
    with GGUFFile.open(tiny_gguf("qwen3next")) as file:
        config = ModelConfig.from_gguf(file)
    layout, recurrent = StateLayout.of(config), config.recurrent
    assert recurrent is not None
    assert layout.recurrent is not None
    group = recurrent.v_heads // recurrent.k_heads
    assert layout.recurrent.key_head == tuple(h // group for h in range(recurrent.v_heads))


def test_estimate_is_what_is_allocated() -> None:
    class Counting(NumpyOps):
        total = 0

        def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> Any:
            array = super().zeros(shape, dtype)
            self.total += array.nbytes
            return array

        def empty(self, shape: tuple[int, ...]) -> Any:
            array = super().empty(shape)
            self.total += array.nbytes
            return array

    for cache_type, mtp in (("f16", True), ("f32", False)):
        ops = Counting()
        state = StateManager(
            ops,
            HYBRID,
            pages=5,
            sequences=3,
            cache_type=cache_type,
            mtp=mtp,
            logged_rows=32,  # type: ignore[arg-type]
        )
        assert state.bytes.log == 0  # not before a step needs them
        sequence = state.open()
        with state.begin([Extend(sequence, 32, partial=True)]):
            pass
        estimate = StateManager.estimate(
            HYBRID,
            pages=5,
            sequences=3,
            cache_type=cache_type,
            mtp=mtp,
            logged_rows=32,  # type: ignore[arg-type]
        )
        pending = 4 * 8 if mtp else 0
        assert state.bytes == StateBytes(estimate.kv, estimate.recurrent, estimate.log, estimate.mtp, pending)
        assert state.bytes.total == ops.total
        with state.begin([Extend(sequence, 9, partial=True)]):
            pass
        assert state.bytes.total == ops.total  # there is room already
