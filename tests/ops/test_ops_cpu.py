"""Every CPU op against its NumPy definition, and what an op refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import op_cases
import pytest
from op_cases import floats, i32, rows_of

from dotllm.errors import UsageError
from dotllm.kernels_cpu.backend import CpuOps
from dotllm.ops.protocol import PAGE, KvLayer
from dotllm.ops.reference import NumpyOps


@pytest.mark.parametrize("run", ["norms", "rope", "attention", "recurrence", "experts", "matrices"])
def test_every_op_computes_its_definition(run: str) -> None:
    run_cases = getattr(op_cases, f"run_{run}")
    expected, found = run_cases(NumpyOps()), run_cases(CpuOps(1))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if value.dtype != np.float32:
            same = np.array_equal(value, found[name])
            assert same, name
        else:
            size = np.abs(value).max()
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6 * size, err_msg=name)


def test_moving_data() -> None:
    ops = CpuOps(1)
    x = floats(1, 4, 6)
    out = ops.empty((3, 6))
    ops.gather(x, i32(3, 0, 3), out)
    assert np.array_equal(out, x[[3, 0, 3]])
    copy = ops.zeros((4, 6))
    ops.copy(x, copy)
    assert np.array_equal(ops.get(copy), x)
    assert ops.zeros((2, 2), "f16").dtype == np.uint16
    assert ops.put(x[:, ::2]).flags.c_contiguous
    assert np.array_equal(ops.load_vector(op_cases.f32_tensor(5, 3, 8)), floats(5, 3, 8, scale=0.2))
    with pytest.raises(UsageError, match=r"0 \.\. 3"):
        ops.gather(x, i32(4), ops.empty((1, 6)))


def test_route_gives_ties_to_the_lowest_id() -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, [7, 33]] = 1.0
    ids, weights = CpuOps(1).route(logits, 4, 1.0)
    assert ids.tolist() == [[7, 33, 0, 1]]
    assert weights.sum() == pytest.approx(1.0)


def attention_arguments() -> dict[str, Any]:
    kv = KvLayer(np.zeros((16, 2, PAGE, 16), np.float32), np.zeros((16, 2, PAGE, 16), np.float32))
    return {
        "q": floats(1, 3, 4, 16), "kv": kv, "rows": rows_of([3], [60]), "scale": 0.25, "window": 0,
        "gate": None, "out": np.empty((3, 4, 16), np.float32),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pages", np.full((1, 8), 16, np.int32), "page does not exist"),
        ("pages", np.full((1, 8), -1, np.int32), "page does not exist"),
        ("pages", np.zeros((1, 1), np.int32), "beyond the sequence's pages"),
        ("positions", i32(-1, 0, 1), "beyond the sequence's pages"),
        ("positions", i32(1, 2), "differ in length"),
        ("positions", i32(1, 3, 2), "not in order"),
        ("sequence", i32(0, 0, 1), "has no pages"),
        ("positions", np.arange(3), "int32"),
    ],
)
def test_attention_refuses_rows_outside_the_cache(field: str, value: Any, message: str) -> None:
    arguments = attention_arguments()
    arguments["rows"] = dataclasses.replace(arguments["rows"], **{field: value})
    with pytest.raises(UsageError, match=message):
        CpuOps(1).attention(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", floats(1, 3, 4, 20)),
        ("q", floats(1, 3, 4, 16).astype(np.float64)),
        ("out", np.empty((4, 3, 16), np.float32).transpose(1, 0, 2)),
        ("gate", floats(1, 2, 4, 16)),
    ],
)
def test_attention_refuses_arrays_of_another_form(name: str, value: Any) -> None:
    with pytest.raises(UsageError):
        CpuOps(1).attention(**{**attention_arguments(), name: value})


def test_a_window_needs_no_pages_before_it() -> None:
    arguments = attention_arguments()
    arguments["rows"].pages[0, 0] = -1
    CpuOps(1).attention(**{**arguments, "window": 20})
    with pytest.raises(UsageError, match="page does not exist"):
        CpuOps(1).attention(**arguments)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("read", i32(2), "plane does not exist"),
        ("write", i32(-1), "plane does not exist"),
        ("write", i32(0, 1), "same sequences"),
        ("starts", i32(0, 2), "do not cover"),
        ("starts", i32(0, 0), "do not cover"),
    ],
)
def test_recurrence_refuses_planes_outside_the_state(field: str, value: Any, message: str) -> None:
    rows = dataclasses.replace(rows_of([3], [0]), **{field: value})
    x, gates = floats(1, 3, 2, 16), floats(2, 3, 2)
    with pytest.raises(UsageError, match=message):
        CpuOps(1).gated_delta(x, x, x, gates, gates, i32(0, 1), np.zeros((2, 2, 16, 16), np.float32), rows, x.copy())


def test_other_refusals() -> None:
    ops = CpuOps(1)
    table = ops.load_table(op_cases.f32_tensor(1, 10, 64))
    with pytest.raises(UsageError, match="token ids"):
        ops.embed(table, i32(10), 1.0, np.empty((1, 64), np.float32))
    with pytest.raises(UsageError, match="experts"):
        ops.route(floats(1, 2, 8), 9, 1.0)
    with pytest.raises(UsageError, match="column"):
        ops.rms_norm(floats(1, 2, 8), floats(2, 8), 1e-6, floats(3, 2, 12), column=5)
    with pytest.raises(UsageError, match="positions"):
        ops.qk_norm_rope(
            floats(1, 1, 1, 8), floats(2, 1, 1, 8), None, None, 1e-6, i32(9), np.zeros((2, 9, 4), np.float32),
            adjacent=False,
        )  # fmt: skip
    gate, down = ops.load(op_cases.f32_tensor(1, 4, 32, 32)), ops.load(op_cases.q8_tensor(1, 4, 32, 32))
    x, out = ops.prepare(floats(1, 1, 32), None, 1e-6, [gate]), floats(2, 1, 32)
    with pytest.raises(UsageError, match=r"0 \.\. 3"):
        ops.experts(x, gate, gate, down, "silu", np.full((1, 2), 4, np.int32), floats(3, 1, 2), out)
    with pytest.raises(UsageError, match="prepared as"):
        ops.linear(x, [ops.load(op_cases.q8_tensor(1, 32, 32))], [out])
