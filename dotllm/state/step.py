"""An open step: rows are computed into reserved pages and spare planes, then `commit` makes some of them real."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from dotllm.batch import Batch
from dotllm.errors import StateError
from dotllm.ops.protocol import Array, KvLayer, Rows
from dotllm.state.kv import page_table
from dotllm.state.recurrent import GdnBuffers, RecurrentState
from dotllm.state.store import Participant, Record, Sequence, Store

__all__ = ["Extend", "Step"]


@dataclass(frozen=True, slots=True)
class Extend:
    """What one sequence may do in a step.

    `rows` is the greatest number of its main rows (a verify: 1 + greatest draft depth); `partial` allows commit to take
    fewer than all of them; `draft` is the greatest number of rows that an MTP head drafts ahead.
    """

    sequence: Sequence
    rows: int
    partial: bool = False
    draft: int = 0


class Step:
    """A transaction over several sequences. Leaving `with` without commit, or by an exception, is abort."""

    def __init__(self, store: Store, plan: tuple[Extend, ...], *, logged: bool) -> None:
        self._store, self.plan, self._logged = store, plan, logged
        self._records = tuple(store.record(extend.sequence) for extend in plan)
        self._begun: list[Participant] = []
        self._after: abc.Mapping[int, Record] | None = None  # the records that commit makes durable
        self._starts: list[int] | None = None
        self._consumed = [0] * len(plan)  # pending rows that the MTP head has seen in this step
        self._chained = [0] * len(plan)  # rows that it drafted after them
        self.open = True

    # ---- what models see
    @property
    def kv(self) -> abc.Sequence[KvLayer]:
        """By index of the attention layer."""
        return self._store.main.layers

    @property
    def recurrent(self) -> RecurrentState:
        """`state[r]` and `conv[r]` by index of the recurrent layer."""
        return self._store.recurrent

    @property
    def logged(self) -> bool:
        """Every recurrent layer has buffers of its own, so that commit can cut the step short."""
        return self._logged

    @property
    def memory(self) -> object:
        """Stands for the memory of the state: another object once it lies elsewhere."""
        return self._store.recurrent.memory

    @property
    def key_head(self) -> NDArray[np.int32]:
        """(HV,): the key head of each value head."""
        return self._store.recurrent.key_head

    def bind(self, batch: Batch) -> Rows:
        """Check the batch against the plan and say where its rows stand; once a step.

        Sequences are those of the plan, in its order; positions go on from each length; rows may be fewer than planned.
        """
        self._require_open()
        if self._starts is not None:
            raise StateError("this step has bound a batch already; a step takes one batch")
        starts = [int(start) for start in batch.starts]
        counts = [end - start for start, end in pairwise(starts)]
        if len(counts) != len(self.plan) or starts[0] != 0 or starts[-1] != batch.rows:
            raise StateError(
                f"the batch has {batch.rows} rows in parts {starts}; the plan has {len(self.plan)} sequences"
            )
        for extend, record, count, start in zip(self.plan, self._records, counts, starts, strict=False):
            if not 1 <= count <= extend.rows:
                raise StateError(
                    f"sequence {extend.sequence.id} has {count} rows in the batch; the plan allows 1 .. {extend.rows}"
                )
            expected = np.arange(record.length, record.length + count)
            if not np.array_equal(batch.positions[start : start + count], expected):
                raise StateError(
                    f"positions of sequence {extend.sequence.id} must go on from its length, {record.length}; "
                    f"the batch starts at {int(batch.positions[start])}"
                )
        self._starts = starts
        return self._rows(counts, [record.length for record in self._records], range(len(self.plan)), 0)

    def buffers(self, layer: int, rows: int) -> GdnBuffers:
        """Where recurrent layer `layer` computes: it must leave them as they are, they may be replayed."""
        self._require_open()
        return self._store.recurrent.buffers(layer, rows, logged=self._logged)

    # ---- the MTP head
    @property
    def mtp_kv(self) -> KvLayer | None:
        """Keys and values of the MTP head, if the state has an MTP track."""
        return None if self._store.mtp is None else self._store.mtp.layers[0]

    def mtp_consume(self, sequences: abc.Sequence[int], counts: abc.Sequence[int] | None = None) -> tuple[Rows, Array]:
        """Rows and hidden (M, E) for a pass of the MTP head over the next pending rows (all, or `counts`).

        `sequences` are indices in the plan; row i wants the token at position rows.positions[i]. These rows become
        durable with commit, as far as their tokens do. The hidden of the last row of each is where a draft starts.
        """
        left = [self._records[i].pending_rows - self._consumed[i] for i in sequences]
        counts = left if counts is None else list(counts)
        for i, count, most in zip(sequences, counts, left, strict=True):
            if self._chained[i] or not 1 <= count <= most:
                raise StateError(
                    f"sequence {self.plan[i].sequence.id}: {count} pending rows are asked for, {most} are left"
                    + ("; it has drafted already in this step" if self._chained[i] else "")
                )
        rows = self._mtp_pass(sequences, counts)
        hidden = self._store.ops.empty((sum(counts), self._store.layout.embedding))
        end = 0
        for i, count in zip(sequences, counts, strict=True):
            for chunk in _part(self._records[i].pending, self._consumed[i], count):
                self._store.ops.copy(chunk, hidden[end : end + chunk.shape[0]])
                end += chunk.shape[0]
        for i, count in zip(sequences, counts, strict=True):
            self._consumed[i] += count
        return rows, hidden

    def mtp_rows(self, sequences: abc.Sequence[int]) -> Rows:
        """One further row of each sequence, on a drafted token and the head's own hidden; never durable."""
        for i in sequences:
            if self._consumed[i] < self._records[i].pending_rows:
                raise StateError(f"sequence {self.plan[i].sequence.id}: consume all pending rows before drafting on")
        rows = self._mtp_pass(sequences, [1] * len(sequences))
        for i in sequences:
            self._chained[i] += 1
        return rows

    def _mtp_pass(self, sequences: abc.Sequence[int], counts: list[int]) -> Rows:
        self._require_open()
        reserved = self._store.reserved[1]
        if self._store.mtp is None or not reserved:
            raise StateError("this state has no MTP track; open it with mtp=True")
        if len(set(sequences)) != len(sequences):
            raise StateError(f"sequences {list(sequences)} of an MTP pass must differ")
        first = [self._records[i].mtp_length + self._consumed[i] + self._chained[i] for i in sequences]
        for i, start, count in zip(sequences, first, counts, strict=True):
            most = self._records[i].length + self.plan[i].draft
            if start + count > most:
                raise StateError(
                    f"sequence {self.plan[i].sequence.id}: the MTP head would reach position {start + count - 1}, "
                    f"but the plan allows a draft of {self.plan[i].draft} after {self._records[i].length} rows"
                )
        return self._rows(counts, first, sequences, 1)

    def _rows(self, counts: list[int], first: list[int], sequences: abc.Sequence[int], track: int) -> Rows:
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        offset = np.array(first, np.int32) - starts[:-1]
        return Rows(
            starts=starts,
            sequence=sequence,
            positions=np.arange(starts[-1], dtype=np.int32) + offset[sequence],
            pages=page_table([self._store.reserved[track][i].table for i in sequences]),
            read=np.array([self._records[i].read for i in sequences], np.int32),
            write=np.array([self._records[i].write for i in sequences], np.int32),
        )

    # ---- the transaction
    def reserve(self) -> None:
        """Take pages and buffers for the greatest depth, then tell the participants; `abort` undoes a part of it."""
        store = self._store
        with store.changing():
            pairs = tuple(zip(self.plan, self._records, strict=True))
            main = tuple(store.main.reserve(r.pages, r.length, r.length + e.rows) for e, r in pairs)
            store.reserved = (main, ())
            if store.mtp is not None:
                mtp = tuple(store.mtp.reserve(r.mtp_pages, r.mtp_length, r.length + e.draft) for e, r in pairs)
                store.reserved = (main, mtp)
        for track, part in ((store.main, store.reserved[0]), (store.mtp, store.reserved[1])):
            for reservation in part:
                if track is not None:
                    track.fill(reservation)
        store.recurrent.reserve(sum(extend.rows for extend in self.plan), logged=self._logged)
        for extend in self.plan:
            for participant in extend.sequence.participants:
                participant.begin()
                self._begun.append(participant)

    def commit(self, accepted: abc.Sequence[int], hidden: Array | None) -> None:
        """The first accepted[s] rows of each sequence become real, the others never happened; all or nothing.

        `hidden` (M, E): post-norm hidden rows of the batch, wanted only with an MTP track. Everything that can fail is
        done before the one assignment that makes the step durable.
        """
        self._require_open()
        self._check_accepted(accepted, hidden)
        store = self._store
        records = dict(store.records)
        drop_main: list[int] = []
        drop_mtp: list[int] = []
        try:
            for i, n in enumerate(accepted):
                records[self.plan[i].sequence.id] = self._advance(i, n, hidden, drop_main, drop_mtp)
            for extend, n in zip(self.plan, accepted, strict=True):
                for participant in extend.sequence.participants:
                    participant.commit(n)
            self._after = records
            with store.changing():
                store.records = records
                store.reserved = ((), ())
                store.main.pool.release(drop_main)
                if store.mtp is not None:
                    store.mtp.pool.release(drop_mtp)
            self.open = False
        except BaseException:
            self.abort()
            raise

    def _check_accepted(self, accepted: abc.Sequence[int], hidden: Array | None) -> None:
        if len(accepted) != len(self.plan):
            raise StateError(f"commit is given {len(accepted)} sequences; the plan has {len(self.plan)}")
        for i, (extend, n) in enumerate(zip(self.plan, accepted, strict=True)):
            rows = self._bound(i)
            if not 0 <= n <= rows:
                raise StateError(f"sequence {extend.sequence.id}: {n} rows to commit, but the batch has {rows}")
            if 0 < n < rows and not extend.partial:
                raise StateError(
                    f"sequence {extend.sequence.id}: {n} of {rows} rows to commit, but the plan did not say `partial`"
                )
        if self._store.mtp is not None and any(accepted):
            rows = 0 if self._starts is None else self._starts[-1]
            if hidden is None or hidden.shape != (rows, self._store.layout.embedding):
                raise StateError(f"commit needs the hidden rows ({rows}, {self._store.layout.embedding}) of the batch")

    def _bound(self, i: int) -> int:
        """Rows of sequence i in the batch."""
        return 0 if self._starts is None else self._starts[i + 1] - self._starts[i]

    def _advance(self, i: int, n: int, hidden: Array | None, drop_main: list[int], drop_mtp: list[int]) -> Record:
        """The record of sequence i after n rows; pages that it no longer needs are added to the lists."""
        store, record = self._store, self._records[i]
        pages, surplus = store.reserved[0][i].settle(record.length, record.length + n)
        drop_main += surplus
        start = 0 if self._starts is None else self._starts[i]
        if 0 < n < self._bound(i):
            store.recurrent.replay(start, n, record.read, record.write)
        plane = 1 - record.plane if n else record.plane
        after = replace(record, plane=plane, length=record.length + n, pages=pages)
        if store.mtp is None:
            return after
        # a row of the head is durable only if its token is, so that another token can still come at that position
        consumed = min(self._consumed[i], after.length - record.mtp_length)
        mtp_length = record.mtp_length + consumed
        mtp_pages, surplus = store.reserved[1][i].settle(record.mtp_length, mtp_length)
        drop_mtp += surplus
        pending = record.pending
        if consumed:
            pending = tuple(_part(pending, consumed, record.pending_rows - consumed))
        if n and hidden is not None:
            rows = store.ops.empty((n, store.layout.embedding))  # the model will write over its own
            store.ops.copy(hidden[start : start + n], rows)
            pending += (rows,)
        return replace(after, mtp_length=mtp_length, mtp_pages=mtp_pages, pending=pending)

    def abort(self) -> None:
        """As if the step had never begun; nothing happens after a commit or a second time."""
        if not self.open:
            return
        failure: BaseException | None = None
        if self._store.records is not self._after:  # else commit was interrupted, but when all was durable
            for participant in self._begun:
                try:
                    participant.abort()
                except BaseException as error:  # the others and the pages must go back all the same
                    failure = failure or error
        self._store.reserved = ((), ())
        self._store.recount()
        self.open = False
        if failure is not None:
            raise failure

    def _require_open(self) -> None:
        if not self.open:
            raise StateError("this step has ended; begin another one")

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def _part(chunks: abc.Sequence[Array], skip: int, count: int) -> abc.Iterator[Array]:
    """Rows skip .. skip + count of chunks laid end to end."""
    for chunk in chunks:
        rows = chunk.shape[0]
        taken = min(rows - skip, count)
        if taken > 0:
            yield chunk[skip : skip + taken]
            count -= taken
        skip = max(0, skip - rows)
