"""A backend that watches another: every op with its tensors, shapes, milliseconds, and the numbers that it wrote.

    model -> Traced(ops).linear(...) -> ops.linear(...)        timed
                     |-> Call("linear", ("blk.0.ffn_gate.weight",), ms, outputs) -> watcher

Watchers: `Recorder` keeps calls (and, up to a budget, copies of the values); `Comparison` holds each call of a second
run against the same call of a first, so that the first op whose results part can be named.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dotllm.ops.protocol import Array, Ops

__all__ = ["HOUSEKEEPING", "OUTPUTS", "Call", "Comparison", "Difference", "Output", "Recorder", "traced"]

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "load": (),
    "load_table": (),
    "load_vector": ("return",),
    "empty": (),
    "zeros": (),
    "put": (),
    "get": (),
    "gather": ("out",),
    "copy": ("target",),
    "embed": ("out",),
    "rms_norm": ("out",),
    "prepare": (),
    "linear": ("outs",),
    "gated_linear": (),
    "rope_table": ("return",),
    "qk_norm_rope": ("q", "k"),
    "kv_store": ("k", "v"),
    "attention": ("out",),
    "conv_silu_l2": ("q", "k", "v"),
    "gdn_gates": ("g", "b"),
    "gated_delta": ("out",),
    "gated_norm": ("x",),
    "route": ("return",),
    "experts": ("out",),
    "gated_add": ("out",),
    "softcap": ("x",),
}
"""The parameters of each op whose values are looked at after the call.

Those it writes; for `kv_store` the keys and values it puts into pages. Prepared rows are opaque and not looked at: the
product that consumes them is.
"""

HOUSEKEEPING = ("empty", "zeros", "put", "get")
"""Ops about memory: when they happen depends on what ran before, so they are no part of a comparison."""

_LOADS = ("load", "load_table", "load_vector")


@dataclass(frozen=True, slots=True)
class Output:
    """What an op wrote to one array. `values` is a copy, or None where none was asked for or kept."""

    name: str
    shape: tuple[int, ...]
    least: float
    greatest: float
    mean: float
    values: NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op; `tensors` are the names of the weights it used."""

    op: str
    tensors: tuple[str, ...]
    milliseconds: float
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one op's results lie apart in two runs: max |a - b|, and that divided by max |a|.

    `index` counts calls from 0, housekeeping left out; `reason` is set where the runs cannot be compared at all.
    """

    index: int
    op: str
    tensors: tuple[str, ...]
    output: str
    absolute: float
    relative: float
    reason: str = ""


def traced(ops: Ops, watch: Callable[[Call], None]) -> Ops:
    """`ops`, with every call reported to `watch` after it has returned."""
    return cast(Ops, _Traced(ops, watch))


class _Traced:
    """Forwards every op of the protocol; the only attributes beside the ops are those of the wrapped backend."""

    def __init__(self, ops: Ops, watch: Callable[[Call], None]) -> None:
        self._ops, self._watch = ops, watch
        self._names: dict[int, tuple[str, Any]] = {}  # the weight is kept, so that its id stays its own
        for op in OUTPUTS:
            setattr(self, op, self._wrapped(op))

    def recorded(self, owner: Any, key: Any, build: Callable[..., Any], inputs: Any, buffers: Any = ()) -> Any:
        return build(*inputs)  # a record would hide the ops in it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _wrapped(self, op: str) -> Callable[..., Any]:
        call = getattr(self._ops, op)
        signature = inspect.signature(call)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            milliseconds = (time.perf_counter() - start) * 1e3
            bound = signature.bind(*args, **kwargs).arguments
            if op in _LOADS:
                self._names[id(result)] = (bound["tensor"].name, result)
                tensors: tuple[str, ...] = (bound["tensor"].name,)
            else:
                tensors = tuple(self._tensors(bound.values()))
            outputs = tuple(self._outputs(op, bound, result))
            self._watch(Call(op, tensors, milliseconds, outputs))
            return result

        return run

    def _tensors(self, arguments: Iterable[Any]) -> Iterable[str]:
        for argument in arguments:
            if isinstance(argument, list | tuple):
                yield from self._tensors(argument)
            elif (known := self._names.get(id(argument))) is not None:
                yield known[0]

    def _outputs(self, op: str, bound: Mapping[str, Any], result: Any) -> Iterable[Output]:
        for parameter in OUTPUTS[op]:
            value = result if parameter == "return" else bound[parameter]
            if isinstance(value, list | tuple):
                yield from (self._output(f"{parameter}[{i}]", part) for i, part in enumerate(value))
            else:
                yield self._output(parameter, value)

    def _output(self, name: str, array: Array) -> Output:
        values = self._ops.get(array)
        if values.size == 0:
            return Output(name, values.shape, 0.0, 0.0, 0.0, values)
        mean = float(values.mean(dtype=np.float64))
        return Output(name, values.shape, float(values.min()), float(values.max()), mean, values)


class Recorder:
    """Keeps every call; copies of the values as long as they fit in `budget` bytes together."""

    def __init__(self, budget: int = 0) -> None:
        self.calls: list[Call] = []
        self._left = budget

    def __call__(self, call: Call) -> None:
        outputs = tuple(self._kept(output) for output in call.outputs)
        self.calls.append(Call(call.op, call.tensors, call.milliseconds, outputs))

    def clear(self) -> None:
        """Forget the calls so far (those of loading a model, say)."""
        self._left += sum(o.values.nbytes for c in self.calls for o in c.outputs if o.values is not None)
        self.calls = []

    def _kept(self, output: Output) -> Output:
        values = output.values
        if values is not None and values.nbytes <= self._left:
            self._left -= values.nbytes
            return output
        return Output(output.name, output.shape, output.least, output.greatest, output.mean, None)


class Comparison:
    """Holds the calls of a run, as they come, against those of an earlier run of the same model and prompt."""

    def __init__(self, first: Sequence[Call]) -> None:
        self.differences: list[Difference] = []
        self._first = [call for call in first if call.op not in HOUSEKEEPING]
        self._index = 0

    def __call__(self, call: Call) -> None:
        if call.op in HOUSEKEEPING:
            return None
        index, self._index = self._index, self._index + 1
        if index >= len(self._first):
            return self._apart(index, call, "the first run ended before this op")
        other = self._first[index]
        if other.op != call.op or [o.shape for o in other.outputs] != [o.shape for o in call.outputs]:
            return self._apart(index, call, f"the first run did {other.op} here, or other shapes")
        for a, b in zip(other.outputs, call.outputs, strict=True):
            absolute, scale = _distance(a, b)
            relative = absolute / scale if scale > 0 else absolute
            self.differences.append(Difference(index, call.op, call.tensors, b.name, absolute, relative))
        return None

    def clear(self) -> None:
        """Start again at the first call."""
        self.differences, self._index = [], 0

    def first_apart(self, tolerance: float) -> Difference | None:
        """The first output whose relative difference exceeds `tolerance`, if there is one."""
        return next((d for d in self.differences if d.reason or not d.relative <= tolerance), None)

    def _apart(self, index: int, call: Call, reason: str) -> None:
        self.differences.append(Difference(index, call.op, call.tensors, "", np.inf, np.inf, reason))


def _distance(a: Output, b: Output) -> tuple[float, float]:
    """max |a - b| and max |a|; of the extremes and means alone where the values of the first run were not kept."""
    scale = max(abs(a.least), abs(a.greatest))
    if a.values is None or b.values is None:
        return max(abs(a.least - b.least), abs(a.greatest - b.greatest), abs(a.mean - b.mean)), scale
    if a.values.size == 0:
        return 0.0, scale
    return float(np.abs(a.values.astype(np.float64) - b.values.astype(np.float64)).max()), scale
