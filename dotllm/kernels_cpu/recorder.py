"""What ops run through: at once, or collected into a program that later passes run without Python.

    ops.rms_norm(..)  ->  recorder.run(command)      outside `recorded`: runs now
    ops.linear(..)    ->  recorder.run(c1, c2, c3)   inside: becomes a group of the program

The first pass with a key builds the program while it checks everything that an op is given. A later pass copies its
inputs to where the first one's lay, checks their values again, and runs the program: shapes, addresses and the order
of calls are those of the key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dotllm.kernels_cpu.program import Command, Program, parts_for
from dotllm.ops.rounding import Rounded, empty_rounded

__all__ = ["Recorder"]

_KEPT = 64  # programs of one owner, the least recently used goes first

Check = Callable[[], object]


@dataclass(slots=True)
class _Recording:
    """A pass while it is recorded."""

    groups: list[tuple[Command, ...]] = field(default_factory=list)
    checks: dict[Hashable, Check] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Recorded:
    inputs: tuple[NDArray[Any], ...]
    checks: tuple[Check, ...]
    program: Program
    result: Any


class Recorder:
    """Runs or records commands on `threads` threads, and lends them scratch memory."""

    def __init__(self, threads: int, least_work: int) -> None:
        self.threads, self._least_work = threads, least_work
        self._open: _Recording | None = None
        self._programs: WeakKeyDictionary[Any, OrderedDict[Hashable, _Recorded]] = WeakKeyDictionary()
        self._scratch: dict[tuple[str, Any], NDArray[Any]] = {}
        self._rounded: dict[tuple[str, str, int], Rounded] = {}

    @property
    def recording(self) -> bool:
        """Nothing runs now: arrays that commands write hold nothing yet."""
        return self._open is not None

    def parts(self, work: int) -> int:
        """In how many parts a command of so many multiply-adds is cut."""
        return parts_for(work, self.threads, self._least_work)

    def run(self, *commands: Command) -> None:
        """Run commands that do not depend on each other, or record them as one group."""
        if self._open is not None:
            self._open.groups.append(commands)
        else:
            Program([commands]).run(self.threads)

    def check(self, key: Hashable, check: Check) -> None:
        """Call `check`, and again in every later pass of a program; once for all that give the same key."""
        if self._open is None:
            check()
        elif key not in self._open.checks:
            check()
            self._open.checks[key] = check

    def scratch(self, name: str, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        """Memory that keeps its contents until the next use of the name."""
        buffer = self._scratch.get((name, dtype))
        if buffer is None or buffer.size < size:
            buffer = self._scratch[name, dtype] = np.empty(size, dtype)
        return buffer[:size]

    def rounded(self, name: str, kind: str, rows: int, columns: int) -> Rounded:
        """Buffers for rounded rows, valid until the next use of the name with as many columns."""
        key = (name, kind, columns)
        buffers = self._rounded.get(key)
        if buffers is None or len(buffers.values) < rows:
            buffers = self._rounded[key] = empty_rounded(kind, rows, columns)
        return Rounded(
            kind, columns, buffers.values[:rows], buffers.scales[:rows], buffers.sums[:rows], buffers.offsets[:rows]
        )

    def recorded(
        self,
        owner: Any,
        key: Hashable,
        build: Callable[..., Any],
        inputs: Sequence[NDArray[Any]],
        buffers: Sequence[NDArray[Any]],
    ) -> Any:
        """As `Ops.recorded` says."""
        if self._open is not None:
            return build(*inputs)
        programs = self._programs.setdefault(owner, OrderedDict())
        shapes = tuple(array.shape for array in inputs)
        places = tuple((array.__array_interface__["data"][0], array.shape) for array in buffers)
        name = (key, shapes, places)
        known = programs.get(name)
        if known is None:
            known = programs[name] = self._record(build, inputs)
            if len(programs) > _KEPT:
                programs.popitem(last=False)
        else:
            programs.move_to_end(name)
            for mine, given in zip(known.inputs, inputs, strict=True):
                mine[...] = given
            for check in known.checks:
                check()
        known.program.run(self.threads)
        return known.result

    def _record(self, build: Callable[..., Any], inputs: Sequence[NDArray[Any]]) -> _Recorded:
        own = tuple(np.array(array, order="C") for array in inputs)
        self._open = recording = _Recording()
        try:
            result = build(*own)
        finally:
            self._open = None
        return _Recorded(own, tuple(recording.checks.values()), Program(recording.groups), result)
