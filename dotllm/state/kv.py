"""A paged key/value cache: arrays for every attention layer of a track, and what a step reserves in it.

    table of a sequence    [ 7 | 2 | 9 | . ]        position p lives in page table[p // PAGE], slot p % PAGE
    durable                |-------->|              up to its length; never written again
    written by a step                |-->           slots beyond the length, in pages that no other table names

All layers of a track share one table: page 7 is page 7 of each layer's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dotllm.ops.protocol import PAGE, CacheType, KvLayer, Ops
from dotllm.state.blocks import BlockPool, pages_for
from dotllm.state.layout import KvShape

LEAST_PAGES = 8

__all__ = ["KvTrack", "Reservation", "page_table"]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room of one sequence for a step: `table` begins with the first `kept` pages of the durable table `before`."""

    before: tuple[int, ...]
    table: tuple[int, ...]
    kept: int

    @property
    def capacity(self) -> int:
        """Positions that the table can hold."""
        return len(self.table) * PAGE

    def settle(self, before: int, after: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The durable table when the length grows from `before` to `after`, and the pages to release."""
        if after == before:
            return self.before, self.table[self.kept :]
        pages = pages_for(after)
        return self.table[:pages], self.table[pages:] + self.before[self.kept :]


class KvTrack:
    """Keys and values of the layers that grow together: those of the main model, or that of an MTP head."""

    def __init__(self, ops: Ops, shapes: Sequence[KvShape], pages: int, cache_type: CacheType, name: str) -> None:
        self._ops = ops
        self.pool = BlockPool(pages, name)
        self.layers = tuple(
            KvLayer(
                k=ops.zeros((pages, shape.heads, PAGE, shape.width), cache_type),
                v=ops.zeros((pages, shape.heads, PAGE, shape.width), cache_type),
            )
            for shape in shapes
        )

    def reserve(self, table: tuple[int, ...], length: int, capacity: int) -> Reservation:
        """Pages for positions length .. capacity - 1; raises OutOfMemory and changes nothing.

        A last page that is partly filled and shared is replaced: `fill` copies it before it is written.
        """
        kept = len(table)
        if capacity > length and length % PAGE and self.pool.shared(table[-1]):
            kept -= 1
        fresh = self.pool.take(max(0, pages_for(capacity) - kept))
        return Reservation(table, table[:kept] + fresh, kept)

    def fill(self, reservation: Reservation) -> None:
        """Copy the page that the reservation replaces, if it replaces one."""
        if reservation.kept == len(reservation.before):
            return
        source, target = reservation.before[-1], reservation.table[reservation.kept]
        for layer in self.layers:
            self._ops.copy(layer.k[source], layer.k[target])
            self._ops.copy(layer.v[source], layer.v[target])


def page_table(tables: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """(S, P) int32, P a power of two; rows that are shorter end in page 0, which their positions never reach.

    P grows rarely, so that few shapes of a step have to be told apart.
    """
    longest = max(map(len, tables), default=1)
    out = np.zeros((len(tables), max(LEAST_PAGES, 1 << (longest - 1).bit_length())), np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out
