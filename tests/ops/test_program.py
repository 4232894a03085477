"""Programs run every part once, group after group; a recorded pass repeats with other inputs and checks them again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from numba import njit
from op_cases import f32_tensor, floats, i32

from dotllm.errors import UsageError
from dotllm.kernels_cpu.backend import CpuOps
from dotllm.kernels_cpu.program import Command, Program


@njit
def _count_part(out: Any, factor: float, more: int, flag: bool, pair: Any, part: int, parts: int) -> None:
    for i in range(out.size * part // parts, out.size * (part + 1) // parts):
        out[i] = out[i] * factor + more + pair[0][i] + (pair[1][0, 0] if flag else 0.0)


@njit
def _fail_part(out: Any, part: int, parts: int) -> None:
    if part == 1:
        raise ValueError("no")
    out[part] = 1.0


@njit
def _double_part(out: Any, part: int, parts: int) -> None:
    # every part reads what all parts of the group before have written
    total = np.float32(0.0)
    for value in out[0]:
        total += value
    out[1, part] = total
    if part == 0:
        out[2, 0] += np.float32(1.0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 7, 64])
def test_arguments_arrive_and_every_part_runs_once(threads: int, parts: int) -> None:
    out = np.arange(100, dtype=np.float32)
    pair = (np.full(100, 0.25, np.float32), np.full((2, 3), 8, np.int32))
    command = Command(_count_part, (out, -0.5, -3, True, pair), parts)
    program = Program([[command], [command], [Command(_count_part, (out, 1.0, 0, False, pair), parts)]])
    expected = np.arange(100, dtype=np.float32)
    for _ in range(3):
        program.run(threads)
        for _ in range(2):
            expected = expected * np.float32(-0.5) - 3 + 0.25 + 8
        expected = expected + np.float32(0.25)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


@njit
def _fill_part(out: Any, row: int, value: float, part: int, parts: int) -> None:
    for i in range(out.shape[1] * part // parts, out.shape[1] * (part + 1) // parts):
        out[row, i] += value


def test_a_group_sees_all_of_the_group_before() -> None:
    out = np.zeros((3, 32), np.float32)
    group = [Command(_fill_part, (out, 0, 1.0), 32)]
    program = Program([group, [Command(_double_part, (out,), 32)]] * 200)
    for repeat in range(1, 20):
        program.run(2)
        assert np.array_equal(out[0], np.full(32, 200 * repeat))
        assert np.array_equal(out[1], np.full(32, 32 * 200 * repeat))
        assert out[2, 0] == 200 * repeat


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failing_kernel_is_named(threads: int) -> None:
    with pytest.raises(RuntimeError, match="_fail_part"):
        Program([[Command(_fail_part, (np.zeros(3, np.float32),), 3)]]).run(threads)
    Program([]).run(threads)


def test_what_kernels_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Program([[Command(_fail_part, (np.zeros((3, 2), np.float32)[:, 0],), 1)]])
    with pytest.raises(TypeError, match="float32"):
        Program([[Command(_fail_part, (np.float32(1.0),), 1)]])


class Owner:
    pass


def test_a_record_repeats_with_other_inputs_and_checks_them() -> None:
    ops, owner, builds = CpuOps(1), Owner(), []
    table, out = ops.load_table(f32_tensor(1, 10, 64)), np.empty((2, 64), np.float32)
    rows = floats(1, 10, 64, scale=0.2)

    def build(ids: Any) -> Any:
        builds.append(len(ids))
        ops.embed(table, ids, 2.0, out)
        return out

    for ids in (i32(3, 9), i32(0, 1)):
        assert ops.recorded(owner, "a", build, [ids]) is out
        np.testing.assert_array_equal(out, rows[ids] * 2)
    assert builds == [2]
    with pytest.raises(UsageError, match="token ids"):
        ops.recorded(owner, "a", build, [i32(0, 10)])
    ops.recorded(owner, "b", build, [i32(3, 9)])
    ops.recorded(owner, "a", build, [i32(3, 9)], [out])
    ops.recorded(owner, "a", build, [i32(3, 9)], [out.copy()])
    assert builds == [2, 2, 2, 2]


def test_a_failed_build_leaves_nothing_recorded() -> None:
    ops, owner = CpuOps(1), Owner()

    def build(ids: Any) -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ops.recorded(owner, "a", build, [i32(1)])
    out = np.zeros((1, 64), np.float32)
    ops.rms_norm(floats(1, 1, 64), floats(2, 64), 1e-6, out)
    assert out.any()  # ops run at once again


def test_a_record_goes_with_its_owner() -> None:
    ops, owners = CpuOps(1), [Owner()]

    def softcapped() -> weakref.ref[Any]:
        x = np.ones((1, 64), np.float32)
        ops.recorded(owners[0], "a", lambda ids: ops.softcap(x, 3.0), [i32(1)])
        return weakref.ref(x)

    kept = softcapped()
    gc.collect()
    assert kept() is not None
    owners.clear()
    gc.collect()
    assert kept() is None
