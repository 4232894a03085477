"""What is durable: one immutable record a sequence, and the arrays, pools and snapshots that records point into.

All records are replaced in a single assignment (`records = ...`), so that a step becomes real for all of its sequences
or for none, wherever it is interrupted. Reference counts only repeat what the tables say; if a change of them was
interrupted they are counted again from the tables before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dotllm.errors import StateError
from dotllm.ops.protocol import Array, CacheType, Ops
from dotllm.state.kv import KvTrack, Reservation
from dotllm.state.layout import StateLayout
from dotllm.state.recurrent import Plane, RecurrentState

__all__ = ["Digested", "Participant", "Record", "Sequence", "Snapshot", "Store"]


class Participant(Protocol):
    """Something else that depends on the tokens of a sequence: sampler history, grammar, detokeniser.

    `abort` goes back to the last `begin`, also after `commit` of the same step: a later part of it may have failed.
    """

    def begin(self) -> None: ...
    def commit(self, n: int) -> None: ...
    def abort(self) -> None: ...
    def snapshot(self) -> object: ...
    def restore(self, saved: object) -> None: ...


@runtime_checkable
class Digested(Protocol):
    """A participant whose state takes part in the digest of its sequence."""

    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Record:
    """The durable state of one sequence. With an MTP head: mtp_length + rows of pending == length + 1."""

    slot: int
    plane: int  # 0 or 1: which of the slot's two planes is durable
    length: int
    pages: tuple[int, ...]
    mtp_length: int
    mtp_pages: tuple[int, ...]
    pending: tuple[Array, ...]  # each (n, E); the first row pairs with the token at position mtp_length

    @property
    def read(self) -> int:
        return 2 * self.slot + self.plane

    @property
    def write(self) -> int:
        return 2 * self.slot + 1 - self.plane

    @property
    def pending_rows(self) -> int:
        return sum(chunk.shape[0] for chunk in self.pending)


class Store:
    """Records of open sequences and snapshots, and the memory that they point into."""

    def __init__(
        self, ops: Ops, layout: StateLayout, pages: int, sequences: int, cache_type: CacheType, mtp: bool
    ) -> None:
        self.ops, self.layout, self.slots = ops, layout, sequences
        self.main = KvTrack(ops, layout.kv, pages, cache_type, "key/value cache")
        self.mtp: KvTrack | None = None
        if mtp:
            if layout.mtp is None:
                raise StateError("this model has no MTP head, so its state cannot have an MTP track; open it without")
            self.mtp = KvTrack(ops, [layout.mtp], pages, cache_type, "key/value cache of the MTP head")
        self.recurrent = RecurrentState(ops, layout.recurrent, layout.recurrent_layers, sequences)
        self.records: Mapping[int, Record] = {}
        self.snapshots: Mapping[int, Snapshot] = {}
        self.reserved: tuple[tuple[Reservation, ...], tuple[Reservation, ...]] = ((), ())  # main, MTP
        self._settled = True

    def record(self, sequence: Sequence) -> Record:
        """The record of an open sequence of this store."""
        if sequence.store is not self:
            raise StateError(f"sequence {sequence.id} belongs to another state")
        if sequence.id not in self.records:
            raise StateError(f"sequence {sequence.id} is closed")
        return self.records[sequence.id]

    def free_slot(self) -> int | None:
        """The lowest slot that no record names."""
        taken = {record.slot for record in self.records.values()}
        return next((slot for slot in range(self.slots) if slot not in taken), None)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around every change of reference counts: one that was interrupted is mended before the next."""
        if not self._settled:
            self.recount()
        self._settled = False
        yield
        self._settled = True

    def recount(self) -> None:
        """Count the references to every page again, from records, snapshots and the reservations of an open step."""
        holders = [*self.records.values(), *(snapshot.record for snapshot in self.snapshots.values())]
        main, mtp = ([reserved.table[reserved.kept :] for reserved in part] for part in self.reserved)
        self.main.pool.recount([*(record.pages for record in holders), *main])
        if self.mtp is not None:
            self.mtp.pool.recount([*(record.mtp_pages for record in holders), *mtp])
        self._settled = True

    def share(self, record: Record) -> None:
        """One more record names these pages."""
        self.main.pool.share(record.pages)
        if self.mtp is not None:
            self.mtp.pool.share(record.mtp_pages)

    def release(self, record: Record) -> None:
        """One record fewer names these pages."""
        self.main.pool.release(record.pages)
        if self.mtp is not None:
            self.mtp.pool.release(record.mtp_pages)


class Sequence:
    """A handle of one sequence; what it says is read from its record. `participants` belongs to the caller."""

    __slots__ = ("id", "participants", "store")

    def __init__(self, store: Store, number: int, participants: list[Participant]) -> None:
        self.store, self.id, self.participants = store, number, participants

    @property
    def length(self) -> int:
        """Rows of the main model that are durable."""
        return self.store.record(self).length

    @property
    def mtp_length(self) -> int:
        """Rows of the MTP head that are durable; 0 without an MTP track."""
        return self.store.record(self).mtp_length

    @property
    def pending(self) -> tuple[Array, ...]:
        """Hidden rows, each (n, E), that the MTP head has not seen; the first pairs with the token at mtp_length."""
        return self.store.record(self).pending

    @property
    def pending_rows(self) -> int:
        """Rows of `pending` together."""
        return self.store.record(self).pending_rows

    @property
    def closed(self) -> bool:
        return self.id not in self.store.records

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {'closed' if self.closed else f'length {self.length}'})"


class Snapshot:
    """A sequence at one length: shared pages, a copied plane, pending rows, what its participants gave."""

    __slots__ = ("id", "participants", "plane", "record", "store")

    def __init__(self, store: Store, number: int, record: Record, plane: Plane, saved: tuple[object, ...]) -> None:
        self.store, self.id, self.record, self.plane, self.participants = store, number, record, plane, saved

    @property
    def length(self) -> int:
        return self.record.length

    @property
    def released(self) -> bool:
        return self.store.snapshots.get(self.id) is not self

    @property
    def bytes(self) -> int:
        """Bytes held beside the page pools: the copied plane and the pending rows."""
        shape = self.store.layout.recurrent
        plane = 0 if shape is None else self.store.layout.recurrent_layers * shape.plane_bytes
        return plane + 4 * self.store.layout.embedding * self.record.pending_rows

    def release(self) -> None:
        """Give the pages back; a second release does nothing."""
        if self.released:
            return
        store = self.store
        with store.changing():
            store.snapshots = {number: kept for number, kept in store.snapshots.items() if number != self.id}
            store.release(self.record)
