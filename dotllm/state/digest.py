"""A hash of what one sequence has durably seen, by which two histories are compared bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

from dotllm.ops.protocol import PAGE
from dotllm.state.kv import KvTrack
from dotllm.state.store import Digested, Participant, Record, Store

__all__ = ["Digest", "digest"]

Digest: TypeAlias = bytes


def digest(store: Store, record: Record, participants: Sequence[Participant]) -> Digest:
    """32 bytes over lengths, keys and values, recurrent plane, pending rows and participants that offer a digest."""
    get, out = store.ops.get, hashlib.blake2b(digest_size=32)
    out.update(f"{record.length} {record.mtp_length} {record.pending_rows}".encode())
    for chunk in _cached(store, store.main, record.pages, record.length):
        out.update(chunk)
    for layers in (store.recurrent.state, store.recurrent.conv):
        for layer in layers:
            out.update(get(layer[record.read]).tobytes())
    if store.mtp is not None:
        for chunk in _cached(store, store.mtp, record.mtp_pages, record.mtp_length):
            out.update(chunk)
        for rows in record.pending:
            out.update(get(rows).tobytes())
    for participant in participants:
        if isinstance(participant, Digested):
            out.update(participant.digest())
    return out.digest()


def _cached(store: Store, track: KvTrack, pages: Sequence[int], length: int) -> list[bytes]:
    """Keys and values below `length`, layer by layer, page by page."""
    chunks = []
    for layer in track.layers:
        for number, page in enumerate(pages):
            filled = min(PAGE, length - number * PAGE)
            chunks += [store.ops.get(array[page])[:, :filled].tobytes() for array in (layer.k, layer.v)]
    return chunks
