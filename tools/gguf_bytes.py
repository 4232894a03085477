"""GGUF files put together byte by byte, so that each byte can be made wrong: for tests and fuzzing."""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["FLOAT32", "INT8", "STRING", "UINT16", "UINT32", "array", "build", "key", "string", "tensor"]

INT8, UINT16, UINT32, FLOAT32, STRING = 1, 2, 4, 6, 8


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string with its length, or with another one."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str | bytes, type: int, value: bytes) -> bytes:
    """A metadata entry whose value is already packed."""
    return string(name) + struct.pack("<I", type) + value


def array(type: int, elements: Sequence[bytes], count: int) -> bytes:
    """An array value that claims `count` elements."""
    return struct.pack("<IQ", type, count) + b"".join(elements)


def tensor(name: str | bytes, sizes: Sequence[int], type: int, offset: int, dimensions: int | None = None) -> bytes:
    """A tensor table entry; `sizes` innermost first."""
    count = len(sizes) if dimensions is None else dimensions
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, type, offset)


def build(
    *keys: bytes,
    tensors: Sequence[tuple[str, Sequence[int], int, int] | bytes] = (),
    data: bytes = b"",
    alignment: int = 32,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
) -> bytes:
    """A file; counts and version may be lies. Tensors are packed entries or (name, sizes, type, offset)."""
    entries = [entry if isinstance(entry, bytes) else tensor(*entry) for entry in tensors]
    counts = (
        len(entries) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(entries)
    return head + bytes(-len(head) % alignment if data else 0) + data
