"""Tracing: every op of the protocol is forwarded and reported, and the first op that differs is found."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from dotllm.gguf.reader import Tensor
from dotllm.gguf.types import GGMLType
from dotllm.ops.protocol import Ops
from dotllm.ops.reference import NumpyOps
from dotllm.ops.trace import OUTPUTS, Call, Comparison, Recorder, traced


def matrix(name: str, values: np.ndarray) -> Tensor:
    return Tensor(name, GGMLType.F32, values.shape, np.frombuffer(values.astype(np.float32).tobytes(), np.uint8))


def small_program(ops: Ops) -> np.ndarray:
    """out = norm(x) W^T, then softcapped."""
    rng = np.random.default_rng(0)
    weight = ops.load(matrix("blk.0.w", rng.normal(size=(3, 8))))
    norm = ops.load_vector(matrix("blk.0.norm", np.ones(8)))
    x = ops.put(rng.normal(size=(2, 8)).astype(np.float32))
    out = ops.empty((2, 3))
    ops.linear(ops.prepare(x, norm, 1e-6, [weight]), [weight], [out])
    ops.softcap(out, 2.0)
    return ops.get(out)


def test_every_op_of_the_protocol_is_traced_and_named_parameters_exist() -> None:
    protocol = {n: f for n, f in vars(Ops).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert set(OUTPUTS) | {"recorded"} == set(protocol)
    for op, parameters in OUTPUTS.items():
        assert set(parameters) - {"return"} <= set(inspect.signature(protocol[op]).parameters), op


def test_a_traced_backend_computes_the_same_and_reports_each_call() -> None:
    recorder = Recorder(budget=1 << 20)
    ops = traced(NumpyOps(), recorder)
    assert ops.name == "numpy"
    np.testing.assert_array_equal(small_program(ops), small_program(NumpyOps()))
    named = [(call.op, call.tensors) for call in recorder.calls]
    assert named == [
        ("load", ("blk.0.w",)),
        ("load_vector", ("blk.0.norm",)),
        ("put", ()),
        ("empty", ()),
        ("prepare", ("blk.0.norm", "blk.0.w")),
        ("linear", ("blk.0.w",)),
        ("softcap", ()),
        ("get", ()),
    ]
    (linear,) = (call for call in recorder.calls if call.op == "linear")
    (out,) = linear.outputs
    assert out.name == "outs[0]"
    assert out.shape == (2, 3)
    assert out.values is not None
    assert (out.least, out.greatest) == (out.values.min(), out.values.max())
    assert out.mean == pytest.approx(out.values.mean())
    assert linear.milliseconds > 0
    # a copy of the time of the call: softcap has since changed the buffer
    assert abs(out.values).max() > abs(recorder.calls[-2].outputs[0].greatest)


def test_values_are_kept_up_to_the_budget_only() -> None:
    recorder = Recorder(budget=8 * 4 + 2 * 3 * 4)
    small_program(traced(NumpyOps(), recorder))
    kept = [call.op for call in recorder.calls for output in call.outputs if output.values is not None]
    assert kept == ["load_vector", "linear"]
    recorder.clear()
    small_program(traced(NumpyOps(), recorder))
    assert recorder.calls[0].op == "load"
    assert recorder.calls[5].outputs[0].values is not None


class Wrong(NumpyOps):
    """NumPy, but softcap is off by a little."""

    def softcap(self, x: Any, cap: float) -> None:
        super().softcap(x, cap)
        x *= 1.01


@pytest.mark.parametrize("budget", [1 << 20, 0])
def test_the_first_op_that_differs_is_named(budget: int) -> None:
    first = Recorder(budget)
    small_program(traced(NumpyOps(), first))
    same = Comparison(first.calls)
    small_program(traced(NumpyOps(), same))
    assert same.first_apart(0.0) is None
    assert max(d.absolute for d in same.differences) == 0.0
    ops = traced(NumpyOps(), same)
    same.clear()
    ops.empty((1,))  # a buffer more or less is no difference
    small_program(ops)
    assert same.first_apart(0.0) is None
    wrong = Comparison(first.calls)
    small_program(traced(Wrong(), wrong))
    apart = wrong.first_apart(1e-3)
    assert apart is not None
    assert apart.op == "softcap"
    assert apart.relative == pytest.approx(0.01, rel=0.1)
    assert wrong.first_apart(0.1) is None


def test_not_a_number_and_another_order_of_ops_are_differences() -> None:
    recorder = Recorder(1 << 20)
    small_program(traced(NumpyOps(), recorder))
    comparison = Comparison(recorder.calls[5:])
    ops = traced(NumpyOps(), comparison)
    out = ops.put(np.zeros((2, 3), np.float32))
    comparison.clear()
    ops.softcap(out, 1.0)
    apart = comparison.first_apart(1.0)
    assert apart is not None
    assert "linear" in apart.reason
    nan = Comparison([Call("softcap", (), 0.0, recorder.calls[6].outputs)])
    ops = traced(NumpyOps(), nan)
    x = np.full((2, 3), np.nan, np.float32)
    ops.softcap(x, 1.0)
    assert nan.first_apart(1.0) is not None
