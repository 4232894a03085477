"""The owner of everything that depends on history. A step is a transaction: rows that are not committed never were.

with state.begin([Extend(sequence, rows=4, partial=True, draft=3)]) as step:    # reserved first, or OutOfMemory
    rows = step.bind(batch)                   # models write pages beyond the length, and the spare plane
    step.commit([2], hidden)                  # one assignment makes two of four rows durable
"""

from __future__ import annotations

import itertools
from collections import abc
from dataclasses import replace

from dotllm.errors import OutOfMemory, StateError
from dotllm.ops.protocol import Array, CacheType, KvLayer, Ops, Rows
from dotllm.state.blocks import pages_for
from dotllm.state.digest import Digest, digest
from dotllm.state.layout import StateBytes, StateLayout
from dotllm.state.step import Extend, Step
from dotllm.state.store import Participant, Record, Sequence, Snapshot, Store

__all__ = ["Extend", "Participant", "Sequence", "Snapshot", "StateManager", "Step"]


class StateManager:
    """KV pages, recurrent planes and the MTP track of up to `sequences` sequences of one model.

    `pages` of PAGE positions are shared by all of them; with `mtp` as many again for the head. A step with a partial
    commit on recurrent layers may have `logged_rows` rows: the rows that a replay needs are kept for all its layers.
    """

    def __init__(
        self,
        ops: Ops,
        layout: StateLayout,
        *,
        pages: int,
        sequences: int,
        cache_type: CacheType = "f16",
        mtp: bool = False,
        logged_rows: int = 256,
    ) -> None:
        if sequences < 1 or logged_rows < 1:
            raise StateError(f"sequences ({sequences}) and logged rows ({logged_rows}) must be at least 1")
        self.layout, self.cache_type, self.logged_rows = layout, cache_type, logged_rows
        self._store = Store(ops, layout, pages, sequences, cache_type, mtp)
        self._step: Step | None = None
        self._numbers = itertools.count()

    # ---- sizes
    @staticmethod
    def estimate(
        layout: StateLayout,
        *,
        pages: int,
        sequences: int,
        cache_type: CacheType = "f16",
        mtp: bool = False,
        logged_rows: int = 256,
    ) -> StateBytes:
        """Bytes that such a state takes with full logs; nothing is allocated."""
        return layout.estimate(
            pages=pages, sequences=sequences, cache_type=cache_type, mtp=mtp, logged_rows=logged_rows
        )

    @property
    def bytes(self) -> StateBytes:
        """Bytes allocated now; logs grow with the largest step seen."""
        store = self._store
        sizes = self.layout.estimate(
            pages=self.pages,
            sequences=store.slots,
            cache_type=self.cache_type,
            mtp=self.mtp,
            logged_rows=store.recurrent.logged_rows,
            pending_rows=sum(record.pending_rows for record in store.records.values()),
        )
        shape = self.layout.recurrent
        return sizes if shape is None else replace(sizes, log=sizes.log + store.recurrent.shared_rows * shape.row_bytes)

    @property
    def mtp(self) -> bool:
        """Whether there is an MTP track."""
        return self._store.mtp is not None

    @property
    def pages(self) -> int:
        return self._store.main.pool.pages

    @property
    def free_pages(self) -> int:
        """Free pages of the pool that has fewer, so that a step of that many fresh pages can begin."""
        store = self._store
        return min(store.main.pool.free, store.mtp.pool.free if store.mtp is not None else store.main.pool.free)

    @property
    def used_pages(self) -> int:
        return self.pages - self.free_pages

    @property
    def free_sequences(self) -> int:
        """How many more sequences can be opened."""
        return self._store.slots - len(self._store.records)

    # ---- sequences
    def open(self) -> Sequence:
        """An empty sequence; OutOfMemory if all slots are in use."""
        store = self._store
        record = Record(self._free_slot(), 0, 0, (), 0, (), self._no_history())
        store.recurrent.clear(record.read)
        return self._add(record, [])

    def close(self, sequence: Sequence) -> None:
        """Give back its pages and its slot. Snapshots of it stay."""
        record = self._idle(sequence, "closed")
        store = self._store
        with store.changing():
            store.records = {number: kept for number, kept in store.records.items() if number != sequence.id}
            store.release(record)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Cut a sequence of a model without recurrent layers to `length` rows; any other raises StateError."""
        record = self._idle(sequence, "cut")
        if not 0 <= length <= record.length:
            raise StateError(f"sequence {sequence.id} has {record.length} rows and cannot be cut to {length}")
        if self.layout.recurrent_layers:
            raise StateError(
                f"sequence {sequence.id} cannot be cut to {length} rows: its recurrent layers keep only the newest "
                f"state; take a snapshot at the place to return to, and restore that"
            )
        if sequence.participants:
            raise StateError(f"sequence {sequence.id} has participants, which cannot be cut; remove them first")
        after = replace(record, length=length, pages=record.pages[: pages_for(length)])
        if self.mtp and length < record.mtp_length and length > 0:
            raise StateError(
                f"sequence {sequence.id} can be cut to 0 or to {record.mtp_length} .. {record.length} rows: "
                f"the hidden row before position {length} is no longer kept"
            )
        if self.mtp and length == 0:
            after = replace(after, mtp_length=0, mtp_pages=(), pending=self._no_history())
        elif self.mtp:
            after = replace(after, pending=_first_rows(record.pending, length + 1 - record.mtp_length))
        store = self._store
        with store.changing():
            store.records = {**store.records, sequence.id: after}
            store.main.pool.release(record.pages[len(after.pages) :])
            if store.mtp is not None:
                store.mtp.pool.release(record.mtp_pages[len(after.mtp_pages) :])

    # ---- steps
    def begin(self, plan: abc.Sequence[Extend]) -> Step:
        """Open a step; use it in `with`. OutOfMemory leaves everything as it was."""
        if self._step is not None and self._step.open:
            raise StateError("a step is open; commit or abort it first")
        logged = any(extend.partial for extend in plan)
        self._check_plan(plan, logged)
        step = Step(self._store, tuple(plan), logged=logged)
        self._step = step
        try:
            step.reserve()
        except BaseException:
            step.abort()
            raise
        return step

    def abort(self) -> None:
        """Abort the step that is open, if one is: for a caller that was interrupted outside `with`."""
        if self._step is not None:
            self._step.abort()

    def flush(self, sequences: abc.Sequence[Sequence], run: abc.Callable[[Rows, Array, KvLayer], object]) -> None:
        """Bring the MTP track of these sequences up to date, all pending rows but the last, in one step of its own.

        `run(rows, hidden (M, E), kv)` is the head without logits; the token of row i is the one that its sequence
        (`rows.sequence[i]` counts those that have more than one pending row) has at position `rows.positions[i]`.
        """
        plan = [Extend(sequence, 0) for sequence in sequences if sequence.pending_rows > 1]
        if not plan:
            return
        with self.begin(plan) as step:
            rows, hidden = step.mtp_consume(range(len(plan)), [e.sequence.pending_rows - 1 for e in plan])
            if step.mtp_kv is not None:
                run(rows, hidden, step.mtp_kv)
            step.commit([0] * len(plan), None)

    # ---- snapshots
    def snapshot(self, sequence: Sequence) -> Snapshot:
        """The sequence as it is now: pages shared, one plane copied. It holds them until it is released."""
        record = self._idle(sequence, "copied")
        saved = tuple(participant.snapshot() for participant in sequence.participants)
        store = self._store
        snapshot = Snapshot(store, next(self._numbers), record, store.recurrent.save(record.read), saved)
        with store.changing():
            store.snapshots = {**store.snapshots, snapshot.id: snapshot}
            store.share(record)
        return snapshot

    def restore(self, snapshot: Snapshot, participants: abc.Sequence[Participant] = ()) -> Sequence:
        """A new sequence that goes on from a snapshot; OutOfMemory if all slots are in use.

        `participants` are brought to what the snapshot holds, in the order of those it was taken from.
        """
        store = self._store
        if snapshot.store is not store or snapshot.released:
            raise StateError(f"snapshot {snapshot.id} is released or belongs to another state")
        if participants and len(participants) != len(snapshot.participants):
            raise StateError(
                f"{len(participants)} participants to restore; the snapshot holds {len(snapshot.participants)}"
            )
        record = replace(snapshot.record, slot=self._free_slot(), plane=0)
        store.recurrent.load(snapshot.plane, record.read)
        for participant, saved in zip(participants, snapshot.participants, strict=bool(participants)):
            participant.restore(saved)
        return self._add(record, list(participants))

    def digest(self, sequence: Sequence) -> Digest:
        """A hash of the durable state: equal for equal histories, whatever pages, planes and slots hold them.

        With an MTP track it also tells how much is still pending; `flush` brings sequences to a common form.
        """
        return digest(self._store, self._store.record(sequence), sequence.participants)

    # ---- helpers
    def _add(self, record: Record, participants: list[Participant]) -> Sequence:
        """Make a new record durable; its pages get one more reference."""
        store = self._store
        sequence = Sequence(store, next(self._numbers), participants)
        with store.changing():
            store.records = {**store.records, sequence.id: record}
            store.share(record)
        return sequence

    def _free_slot(self) -> int:
        slot = self._store.free_slot()
        if slot is None:
            raise OutOfMemory(
                f"all {self._store.slots} sequences of the state are open; close one, or start with more sequences"
            )
        return slot

    def _no_history(self) -> tuple[Array, ...]:
        """Pending rows of an empty sequence: zeros pair with the first token."""
        return (self._store.ops.zeros((1, self.layout.embedding)),) if self.mtp else ()

    def _idle(self, sequence: Sequence, doing: str) -> Record:
        """The record of a sequence that takes no part in the open step."""
        record = self._store.record(sequence)
        if self._step is not None and self._step.open and any(e.sequence is sequence for e in self._step.plan):
            raise StateError(f"sequence {sequence.id} takes part in the open step and cannot be {doing} now")
        return record

    def _check_plan(self, plan: abc.Sequence[Extend], logged: bool) -> None:
        if not plan:
            raise StateError("a step needs at least one sequence")
        numbers = [extend.sequence.id for extend in plan]
        if len(set(numbers)) != len(numbers):
            raise StateError(f"a sequence comes twice in the plan: {numbers}")
        for extend in plan:
            self._store.record(extend.sequence)
            if extend.rows < 0 or extend.draft < 0:
                raise StateError(f"rows ({extend.rows}) and draft ({extend.draft}) of a plan cannot be negative")
        rows = sum(extend.rows for extend in plan)
        if logged and self.layout.recurrent_layers and rows > self.logged_rows:
            raise StateError(
                f"a step with a partial commit has {rows} rows; recurrent layers can log {self.logged_rows}: "
                f"plan fewer prompt rows beside a verify, or open the state with more logged rows"
            )


def _first_rows(chunks: tuple[Array, ...], count: int) -> tuple[Array, ...]:
    kept = []
    for chunk in chunks:
        if count > 0:
            kept.append(chunk[:count])
        count -= chunk.shape[0]
    return tuple(kept)
