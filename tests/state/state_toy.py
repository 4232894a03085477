"""A model without weights for the tests of the state, and its history computed one row at a time without any paging.

The toy reads and writes every kind of state: what a row gives depends on all rows before it through the recurrent
state, the convolution window and the cached keys and values. It only adds, multiplies, divides and looks up, so that a
row has the same bits in every batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dotllm.batch import Batch
from dotllm.ops.protocol import PAGE, KvLayer, Rows
from dotllm.ops.reference import NumpyOps
from dotllm.state.blocks import pages_for
from dotllm.state.layout import KvShape, RecurrentShape, StateLayout
from dotllm.state.manager import Extend, StateManager
from dotllm.state.manager import Sequence as Handle
from dotllm.state.recurrent import GdnBuffers

VOCABULARY = 32
WIDTH = 8  # E = HV * D, and twice the width of a cached key
SHAPE = RecurrentShape(taps=4, key_heads=1, value_heads=2, width=4, key_head=(0, 0))
HYBRID = StateLayout((KvShape(1, 4),), 2, SHAPE, KvShape(1, 4), WIDTH, (0, 0, 1))
ATTENTION = StateLayout((KvShape(1, 4), KvShape(1, 4)), 0, None, None, WIDTH, (0, 1))


def squash(x: Any) -> Any:
    return x / (1 + np.abs(x))


def cached(array: Any) -> Any:
    return (array.view(np.float16) if array.dtype == np.uint16 else array).astype(np.float32)


class Toy:
    """forward(batch, step) -> hidden (M, E); head(tokens, hidden, rows, kv) -> own hidden (M, E)."""

    def __init__(self, layout: StateLayout, ops: Any = None) -> None:
        rng = np.random.default_rng(7)
        self.ops, self.layout = ops or NumpyOps(), layout
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
        self.taps = rng.standard_normal((2, SHAPE.channels, SHAPE.taps)).astype(np.float32)
        self.out = np.empty((1024, WIDTH), np.float32)  # used again by the next forward, as models do

    def forward(self, batch: Batch, step: Any) -> Any:
        rows = step.bind(batch)
        x = self.embedding[batch.tokens]
        for layer in range(self.layout.recurrent_layers):
            x = self._recurrent(x, layer, rows, step)
        for kv in step.kv:
            x = self._attend(x, rows, kv)
        out = self.out[: batch.rows]
        out[...] = squash(x)
        return out

    def head(self, tokens: Any, hidden: Any, rows: Rows, kv: KvLayer) -> Any:
        return squash(self._attend(squash(self.embedding[tokens] + hidden), rows, kv))

    def _recurrent(self, x: Any, layer: int, rows: Rows, step: Any) -> Any:
        m = len(x)
        buffers = step.buffers(layer, m)
        buffers.u[...] = np.concatenate([x, squash(x * (layer + 2))], axis=1)
        conv, out = step.recurrent.conv[layer], np.empty((m, 2, 4), np.float32)
        self.ops.conv_silu_l2(buffers.u, self.taps[layer], conv, rows, 1e-6, buffers.q, buffers.k, buffers.v)
        buffers.g[...] = -np.abs(x[:, :2])
        buffers.b[...] = np.abs(squash(x[:, 2:4]))
        q, k, v, g, b = buffers[1:]
        self.ops.gated_delta(q, k, v, g, b, step.key_head, step.recurrent.state[layer], rows, out)
        return x + out.reshape(m, WIDTH)

    def _attend(self, x: Any, rows: Rows, kv: KvLayer) -> Any:
        new = squash(x).reshape(len(x), 2, 1, 4)
        self.ops.kv_store(kv, rows, new[:, 0], new[:, 1])
        seen = np.empty_like(x)
        for row, position in enumerate(rows.positions):
            at = np.arange(position + 1)
            page, slot = rows.pages[rows.sequence[row], at // PAGE], at % PAGE
            both = np.concatenate([cached(a[page, :, slot])[:, 0] for a in (kv.k, kv.v)], axis=1)
            seen[row] = both.sum(axis=0) / np.float32(position + 1)
        return x + seen


@dataclass
class History:
    """Everything durable after some tokens; also the step that the toy's forward writes into."""

    kv: list[KvLayer]
    mtp: KvLayer
    state: list[Any]
    conv: list[Any]
    hidden: list[Any]
    key_head: Any
    recurrent: Any = None

    def __post_init__(self) -> None:
        self.recurrent = self

    def copy(self) -> History:
        def layer(kv: KvLayer) -> KvLayer:
            return KvLayer(kv.k.copy(), kv.v.copy())

        state, conv = [a.copy() for a in self.state], [a.copy() for a in self.conv]
        return History([layer(a) for a in self.kv], layer(self.mtp), state, conv, list(self.hidden), self.key_head)

    def rows(self) -> Rows:
        zero, p = np.zeros(1, np.int32), np.array([len(self.hidden) - 1], np.int32)
        pages = np.arange(self.mtp.k.shape[0], dtype=np.int32)[None]
        return Rows(np.array([0, 1], np.int32), zero, p, pages, zero, zero + 1)

    def bind(self, batch: Batch) -> Rows:
        return self.rows()

    def buffers(self, layer: int, rows: int) -> GdnBuffers:
        shapes = ((16,), (1, 4), (1, 4), (2, 4), (2,), (2,))
        return GdnBuffers(*(np.empty((rows, *shape), np.float32) for shape in shapes))


class Oracle:
    """Durable state after any tokens, by computing them one row at a time; prefixes are remembered."""

    def __init__(self, layout: StateLayout, cache_type: str = "f16", pages: int = 8, *, mtp: bool = True) -> None:
        self.toy, self.layout, self.mtp = Toy(layout), layout, mtp
        zeros = self.toy.ops.zeros

        def layer() -> KvLayer:
            return KvLayer(zeros((pages, 1, PAGE, 4), cache_type), zeros((pages, 1, PAGE, 4), cache_type))

        layers = range(layout.recurrent_layers)
        state, conv = [zeros((2, 2, 4, 4)) for _ in layers], [zeros((2, 3, 16)) for _ in layers]
        kv = [layer() for _ in layout.kv]
        empty = History(kv, layer(), state, conv, [np.zeros(WIDTH, np.float32)], np.zeros(2, np.int32))
        self.known: dict[tuple[int, ...], History] = {(): empty}

    def history(self, tokens: Sequence[int]) -> History:
        done = len(tokens)
        while tuple(tokens[:done]) not in self.known:
            done -= 1
        history = self.known[tuple(tokens[:done])]
        for position in range(done, len(tokens)):
            history = history.copy()
            token = np.array([tokens[position]])
            self.toy.head(token, history.hidden[-1][None], history.rows(), history.mtp)
            hidden = self.toy.forward(Batch.build([token.tolist()], [position], [0]), history)
            for array in (*history.state, *history.conv):
                array[0] = array[1]
            history.hidden.append(hidden[0].copy())
            self.known[tuple(tokens[: position + 1])] = history
        return history

    def digest(self, tokens: Sequence[int], mtp_length: int) -> bytes:
        """What StateManager.digest gives for a sequence of these tokens without participants."""
        history, length, out = self.history(tokens), len(tokens), hashlib.blake2b(digest_size=32)
        pending = history.hidden[mtp_length:] if self.mtp else []
        out.update(f"{length} {mtp_length} {len(pending)}".encode())
        cache(out.update, history.kv, length)
        for array in (*history.state, *history.conv):
            out.update(array[0].tobytes())
        if self.mtp:
            cache(out.update, [history.mtp], mtp_length)
            for row in pending:
                out.update(row.tobytes())
        return out.digest()


def cache(update: Callable[[bytes], object], layers: Sequence[KvLayer], length: int) -> None:
    for layer in layers:
        for page in range(pages_for(length)):
            for array in (layer.k, layer.v):
                update(array[page, :, : length - page * PAGE].tobytes())


def run(
    toy: Toy,
    state: StateManager,
    work: Sequence[tuple[Handle, Sequence[int], int]],
    *,
    drafts: int = 0,
    history: Sequence[Sequence[int]] = (),
) -> None:
    """One step: (sequence, tokens, how many to commit) each; with `drafts`, the head first drafts on random hidden.

    `history[s]`, the tokens before, is wanted when the head has to catch up.
    """
    with state.begin([Extend(s, len(t), partial=n not in (0, len(t)), draft=drafts) for s, t, n in work]) as step:
        if drafts:
            draft(toy, step, [[*h, t[0]] for h, (_, t, _) in zip(history, work, strict=True)], drafts)
        batch = Batch.build([list(t) for _, t, _ in work], [s.length for s, _, _ in work], [0] * len(work))
        hidden = toy.forward(batch, step)
        step.commit([n for _, _, n in work], hidden)


def draft(toy: Toy, step: Any, tokens: Sequence[Sequence[int]], depth: int) -> None:
    """Catch up and draft `depth` rows of every sequence; tokens[s] is its history and the token to come."""
    which = range(len(tokens))
    rows, hidden = step.mtp_consume(which)
    wanted = np.array([tokens[s][p] for s, p in zip(rows.sequence, rows.positions, strict=True)])
    own = toy.head(wanted, hidden, rows, step.mtp_kv)[rows.starts[1:] - 1]
    for _ in range(depth - 1):
        rows = step.mtp_rows(which)
        own = toy.head(rows.positions % VOCABULARY, own, rows, step.mtp_kv)


def catch_up(toy: Toy, state: StateManager, pairs: Sequence[tuple[Handle, Sequence[int]]]) -> None:
    """Flush the pending rows of sequences whose tokens are given."""
    late = [(s, t) for s, t in pairs if s.pending_rows > 1]

    def head(rows: Rows, hidden: Any, kv: KvLayer) -> None:
        tokens = np.array([late[s][1][p] for s, p in zip(rows.sequence, rows.positions, strict=True)])
        toy.head(tokens, hidden, rows, kv)

    state.flush([s for s, _ in pairs], head)


def audit(state: StateManager, snapshots: int | None = None) -> None:
    """Every page is free or named as often as it is counted; tables, planes and the MTP invariant hold."""
    store = state._store
    records = list(store.records.values())
    holders = [*records, *(s.record for s in store.snapshots.values())]
    assert snapshots is None or len(store.snapshots) == snapshots
    assert len({r.slot for r in records}) == len(records) <= store.slots
    for number, track in enumerate([store.main] + ([store.mtp] if store.mtp else [])):
        tables = [r.mtp_pages if number else r.pages for r in holders]
        reserved = [r.table[r.kept :] for r in store.reserved[number]] if store.reserved[number] else []
        counts = np.bincount([p for t in [*tables, *reserved] for p in t], minlength=track.pool.pages)
        assert [track.pool.references(p) for p in range(track.pool.pages)] == counts.tolist()
        assert sorted(track.pool._free) == np.flatnonzero(counts == 0).tolist()
        assert track.pool.free + track.pool.used == track.pool.pages
        for table, holder in zip(tables, holders, strict=True):
            assert len(table) == pages_for(holder.mtp_length if number else holder.length)
    for record in holders:
        if store.mtp:
            assert record.mtp_length + record.pending_rows == record.length + 1
            assert record.mtp_length <= record.length
        else:
            assert (record.mtp_length, record.mtp_pages, record.pending) == (0, (), ())
