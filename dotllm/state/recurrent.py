"""The state of Gated DeltaNet layers: two planes a sequence, and the log from which a step is cut short.

    slot s owns planes 2s and 2s + 1.   forward: reads one (durable), writes the other.   commit: they change places.

When only the first n rows of a step become real, the plane just written is written again: the same recurrence, from
the same old plane, over the first n logged rows. Same code, same inputs, same order, so the same bits as if the other
rows had never been computed. The convolution window needs no arithmetic: it is the last C - 1 raw rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dotllm.errors import StateError
from dotllm.ops.protocol import Array, Ops, Rows
from dotllm.state.layout import RecurrentShape

__all__ = ["GdnBuffers", "Plane", "RecurrentState"]

_GROW = 16  # logs grow by this many rows, so that a depth that varies does not allocate again and again


class GdnBuffers(NamedTuple):
    """Where a Gated DeltaNet layer computes, and what a replay of its recurrence needs (M rows)."""

    u: Array  # (M, W) raw rows, before the convolution
    q: Array  # (M, HK, D)
    k: Array  # (M, HK, D)
    v: Array  # (M, HV, D)
    g: Array  # (M, HV) log decay
    b: Array  # (M, HV) write strength

    def rows(self, start: int, end: int) -> GdnBuffers:
        """The same buffers, seen through rows start .. end."""
        return GdnBuffers(*(array[start:end] for array in self))


class Memory:
    """Stands for buffers at their present addresses; records of ops that use them live as long as it does."""


class Plane(NamedTuple):
    """A copy of one plane of all recurrent layers."""

    state: tuple[Array, ...]  # each (HV, D, D)
    conv: tuple[Array, ...]  # each (C - 1, W)


class RecurrentState:
    """Planes of `slots` sequences; `state[r]` (planes, HV, D, D) and `conv[r]` (planes, C - 1, W) of layer r."""

    def __init__(self, ops: Ops, shape: RecurrentShape | None, layers: int, slots: int) -> None:
        self._ops, self.shape, self.layers = ops, shape, layers
        self.state: tuple[Array, ...] = ()
        self.conv: tuple[Array, ...] = ()
        self._zero = Plane((), ())
        self._shared: GdnBuffers | None = None
        self._log: tuple[GdnBuffers, ...] = ()
        self._out: Array = None
        self.memory = Memory()
        self.key_head = np.zeros(0, np.int32)
        if shape is None:
            return
        s, c = (shape.value_heads, shape.width, shape.width), (shape.taps - 1, shape.channels)
        self.state = tuple(ops.zeros((2 * slots, *s)) for _ in range(layers))
        self.conv = tuple(ops.zeros((2 * slots, *c)) for _ in range(layers))
        self._zero = Plane((ops.zeros(s),) * layers, (ops.zeros(c),) * layers)
        self.key_head = np.array(shape.key_head, np.int32)

    def clear(self, plane: int) -> None:
        """The state of an empty sequence."""
        self.load(self._zero, plane)

    def save(self, plane: int) -> Plane:
        """A copy of a plane."""
        saved = Plane(
            tuple(self._ops.empty(layer.shape[1:]) for layer in self.state),
            tuple(self._ops.empty(layer.shape[1:]) for layer in self.conv),
        )
        for layers, copies in ((self.state, saved.state), (self.conv, saved.conv)):
            for layer, target in zip(layers, copies, strict=True):
                self._ops.copy(layer[plane], target)
        return saved

    def load(self, saved: Plane, plane: int) -> None:
        """Write a copy back."""
        for layers, copies in ((self.state, saved.state), (self.conv, saved.conv)):
            for layer, source in zip(layers, copies, strict=True):
                self._ops.copy(source, layer[plane])

    def reserve(self, rows: int, *, logged: bool) -> None:
        """Make room for a step of this many rows: one set of buffers for all layers, or one for each if `logged`."""
        if self.shape is None:
            return
        if logged:
            if not self._log or self._log[0].u.shape[0] < rows:
                rows = -(-rows // _GROW) * _GROW
                self._log, self.memory = (), Memory()  # let go of the old ones first
                log = tuple(self._allocate(self.shape, rows) for _ in range(self.layers))
                self._out = self._ops.empty((rows, self.shape.value_heads, self.shape.width))
                self._log = log
        elif self._shared is None or self._shared.u.shape[0] < rows:
            self._shared, self.memory = None, Memory()
            self._shared = self._allocate(self.shape, rows)

    def _allocate(self, shape: RecurrentShape, rows: int) -> GdnBuffers:
        keys, values, width = shape.key_heads, shape.value_heads, shape.width
        shapes = ((shape.channels,), (keys, width), (keys, width), (values, width), (values,), (values,))
        return GdnBuffers(*(self._ops.empty((rows, *tail)) for tail in shapes))

    @property
    def logged_rows(self) -> int:
        """Rows that the logs can hold now."""
        return self._log[0].u.shape[0] if self._log else 0

    @property
    def shared_rows(self) -> int:
        """Rows that the shared buffers can hold now."""
        return 0 if self._shared is None else int(self._shared.u.shape[0])

    def buffers(self, layer: int, rows: int, *, logged: bool) -> GdnBuffers:
        """The first `rows` rows of the buffers of one layer; raises StateError beyond what was reserved."""
        room = self.logged_rows if logged else self.shared_rows
        if not 0 <= layer < self.layers or rows > room:
            raise StateError(
                f"recurrent layer {layer} asks for buffers of {rows} rows; there are {self.layers} layers "
                f"and the step has reserved {room} rows"
            )
        buffers = self._log[layer] if logged else self._shared
        if buffers is None:
            raise StateError("no step has reserved buffers")
        return buffers.rows(0, rows)

    def replay(self, start: int, rows: int, read: int, write: int) -> None:
        """Write plane `write` again, from plane `read` and the logged rows start .. start + rows of each layer."""
        if self.shape is None:
            return
        one = np.zeros(1, np.int32)
        ends = np.array([0, rows], np.int32)
        self._ops.recorded(
            self.memory, ("replay", start, rows), lambda *where: self._recur(start, rows, *where),
            (ends, one + read, one + write),
        )  # fmt: skip
        window = self.shape.taps - 1
        old = max(0, window - rows)  # rows of the old window that are still in it
        for log, conv in zip(self._log, self.conv, strict=True):
            if old:
                self._ops.copy(conv[read][window - old :], conv[write][:old])
            if window > old:
                self._ops.copy(log.u[start + rows - (window - old) : start + rows], conv[write][old:])

    def _recur(self, start: int, rows: int, ends: Array, read: Array, write: Array) -> None:
        """The recurrence of all layers over logged rows; a batch of one sequence, from plane read[0] to write[0]."""
        where = Rows(
            starts=ends,
            sequence=np.zeros(rows, np.int32),
            positions=np.arange(rows, dtype=np.int32),
            pages=np.zeros((1, 1), np.int32),
            read=read,
            write=write,
        )
        for layer, log in enumerate(self._log):
            log = log.rows(start, start + rows)
            state, out = self.state[layer], self._out[:rows]
            self._ops.gated_delta(log.q, log.k, log.v, log.g, log.b, self.key_head, state, where, out)
