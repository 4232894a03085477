"""The bounds-checked parser of one GGUF file: header, metadata, tensor table.

Nothing in the file is trusted: every length, count and offset is compared with the bytes that are there before it is
used, and counts are capped before any loop or allocation depends on them. All numbers are little-endian:

    "GGUF" | version u32 | tensors u64 | keys u64
    key:    name string | value type u32 | value                          (string: length u64, then UTF-8 bytes)
    tensor: name string | dimensions u32 | sizes u64, innermost first | type u32 | offset u64
    zeros up to a multiple of the alignment | tensor data
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from dotllm.errors import ModelFileError, UnsupportedModel
from dotllm.gguf.types import FORMATS, GGMLType

__all__ = ["Header", "Metadata", "TensorInfo", "ValueType", "parse_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 24  # elements of one array of strings; the largest vocabularies have 2^18
MAX_STRING_BYTES = 1 << 24  # a single value; the longest chat templates take some 2^16
MAX_KEY_BYTES = 65535  # set by the GGUF specification
MAX_NAME_BYTES = 64  # set by the GGUF specification
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
_LEAST_KEY_BYTES = 8 + 1 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_U64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_NUMBERS: Mapping[ValueType, str] = {
    ValueType.UINT8: "<u1",
    ValueType.INT8: "<i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.BOOL: "<u1",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table; `shape` outermost dimension first, `start` a byte offset in the file."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """All of a GGUF file but the tensor data."""

    version: int
    alignment: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class _ArraySpan:
    """An array that has been bounds-checked but not decoded."""

    type: ValueType
    count: int
    start: int


class _Cursor:
    """Reads forward through a mapped file and raises ModelFileError instead of passing its end."""

    def __init__(self, data: mmap.mmap, label: str) -> None:
        self.data = data
        self.label = label
        self.position = 0
        self.end = len(data)
        self.section = "the header"

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.label}: {problem} (in {self.section}, byte {self.position})")

    def take(self, count: int) -> int:
        """The offset of the next `count` bytes, which are then behind the cursor."""
        start = self.position
        if count > self.end - start:
            raise self.fail(f"the file is cut off: {count} bytes needed, {self.end - start} left; download it again")
        self.position = start + count
        return start

    def number(self, dtype: str) -> Any:
        """A Python number of a little-endian NumPy type."""
        width = int(dtype[2])
        return np.frombuffer(self.raw(width), dtype)[0].item()

    def raw(self, count: int) -> bytes:
        start = self.take(count)
        return bytes(self.data[start : start + count])

    def u32(self) -> int:
        return int.from_bytes(self.raw(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.raw(8), "little")

    def string(self, what: str, limit: int) -> bytes:
        length = self.u64()
        if length > limit:
            raise self.fail(f"{what} has {length} bytes; at most {limit} are allowed")
        return self.raw(length)

    def identifier(self, what: str, limit: int) -> str:
        """A key or a tensor name: not empty, valid UTF-8."""
        raw = self.string(what, limit)
        if not raw:
            raise self.fail(f"{what} is empty")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def value_type(self) -> ValueType:
        value = self.u32()
        try:
            return ValueType(value)
        except ValueError:
            raise self.fail(f"value type {value} does not exist") from None

    def value(self) -> Any:
        """A scalar, or the span of an array."""
        kind = self.value_type()
        if kind is ValueType.STRING:
            return _text(self.string("a string", MAX_STRING_BYTES))
        if kind is ValueType.ARRAY:
            return self.array()
        number = self.number(_NUMBERS[kind])
        if kind is ValueType.BOOL:
            if number > 1:
                raise self.fail(f"a boolean is {number}")
            return bool(number)
        return number

    def array(self) -> _ArraySpan:
        kind = self.value_type()
        count = self.u64()
        if kind is ValueType.ARRAY:
            raise self.fail("arrays of arrays are not supported")
        start = self.position
        if kind is not ValueType.STRING:
            self.take(count * int(_NUMBERS[kind][2]))
            return _ArraySpan(kind, count, start)
        if count > min(MAX_STRINGS, (self.end - start) // 8):
            raise self.fail(f"an array of {count} strings does not fit in the file: it is cut off, or the count wrong")
        self.position = self.skip_strings(start, count)
        return _ArraySpan(kind, count, start)

    def skip_strings(self, position: int, count: int) -> int:
        """The offset after `count` strings. A tight loop: vocabularies hold a quarter of a million strings."""
        data, length_at = self.data, _U64.unpack_from
        try:
            for _ in range(count):
                (length,) = length_at(data, position)
                position += 8 + length
        except (struct.error, OverflowError):  # beyond the file
            position = self.end + 1
        if position <= self.end:
            return position
        raise self.fail("the file is cut off inside an array of strings, or a length in it is wrong")


class Metadata(Mapping[str, Any]):
    """Keys and values of a file. Arrays are decoded when first asked for: numbers to NumPy arrays, strings to a list.

    Invalid UTF-8 in a value becomes U+FFFD, so that every string can be printed and handed to any library.
    """

    def __init__(self, data: mmap.mmap, label: str, values: dict[str, Any]) -> None:
        self._data = data
        self._label = label
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _ArraySpan):
            if self._data.closed:
                raise ModelFileError(f"{self._label}: key {key!r} was not read before the file was closed")
            value = self._values[key] = _decode(self._data, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _decode(data: mmap.mmap, span: _ArraySpan) -> Any:
    if span.type is not ValueType.STRING:
        width = int(_NUMBERS[span.type][2])
        raw = data[span.start : span.start + span.count * width]
        numbers = np.frombuffer(raw, _NUMBERS[span.type])
        return numbers != 0 if span.type is ValueType.BOOL else numbers
    strings, position, length_at = [], span.start, _U64.unpack_from
    for _ in range(span.count):
        start = position + 8
        position = start + length_at(data, position)[0]
        strings.append(_text(data[start:position]))
    return strings


def parse_header(data: mmap.mmap, label: str) -> Header:
    """Parse everything before the tensor data; `label` names the file in messages. Raises ModelFileError."""
    cursor = _Cursor(data, label)
    version = _version(cursor)
    tensor_count, key_count = cursor.u64(), cursor.u64()
    if tensor_count > min(MAX_TENSORS, cursor.end // _LEAST_TENSOR_BYTES):
        raise cursor.fail(f"{tensor_count} tensors do not fit in the file: it is cut off, or the count wrong")
    if key_count > min(MAX_KEYS, cursor.end // _LEAST_KEY_BYTES):
        raise cursor.fail(f"{key_count} metadata keys do not fit in the file: it is cut off, or the count wrong")
    values = _keys(cursor, key_count)
    alignment = _alignment(cursor, values)
    tensors = _tensor_table(cursor, tensor_count, alignment)
    return Header(version, alignment, Metadata(data, label, values), tensors)


def _version(cursor: _Cursor) -> int:
    start = bytes(cursor.data[:64])
    if start[:4] != MAGIC:
        raise ModelFileError(f"{cursor.label}: not a GGUF file{_guess(start)}")
    cursor.take(4)
    version = cursor.u32()
    if version & 0xFFFF == 0 and version:
        raise ModelFileError(f"{cursor.label}: a big-endian GGUF file; convert it to little-endian")
    if version not in VERSIONS:
        raise ModelFileError(
            f"{cursor.label}: GGUF version {version} is not supported (2 and 3 are); "
            + ("update dotllm or convert the model again" if version > max(VERSIONS) else "convert the model again")
        )
    return version


def _guess(start: bytes) -> str:
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!do", b"<html", b"<head", b"<?xml")):
        return " (looks like HTML: the download page was saved instead of the model)"
    if text.startswith(b"version https://git-lfs"):
        return " (a Git LFS pointer: run `git lfs pull`, or download the file itself)"
    return f" (it begins with {start[:4]!r})"


def _keys(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(count):
        cursor.section = f"metadata key {index + 1} of {count}"
        key = cursor.identifier("a key", MAX_KEY_BYTES)
        cursor.section = f"metadata key {key!r}"
        if key in values:
            raise cursor.fail("the key appears twice")
        values[key] = cursor.value()
        if key == "general.alignment" and (type(values[key]) is not int):
            raise cursor.fail("the alignment must be a whole number")
    return values


def _alignment(cursor: _Cursor, values: Mapping[str, Any]) -> int:
    alignment: int = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelFileError(
            f"{cursor.label}: general.alignment is {alignment}; a power of two from 8 to {MAX_ALIGNMENT} is needed"
        )
    return alignment


def _tensor_table(cursor: _Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    entries: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.section = f"tensor table entry {index + 1} of {count}"
        name = cursor.identifier("a tensor name", MAX_NAME_BYTES)
        cursor.section = f"tensor table entry {name!r}"
        if name in entries:
            raise cursor.fail("the tensor appears twice")
        entries[name] = _tensor(cursor, name, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(TensorInfo(t.name, t.type, t.shape, data_start + t.start, t.nbytes) for t in entries.values())
    _check_extents(cursor, tensors)
    return tensors


def _tensor(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """One table entry, with `start` still counted from the beginning of the data."""
    dimensions = cursor.u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"{dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    sizes = tuple(cursor.u64() for _ in range(dimensions))
    if 0 in sizes:
        raise cursor.fail(f"a dimension is zero: {sizes}")
    number, offset = cursor.u32(), cursor.u64()
    try:
        kind = GGMLType(number)
    except ValueError:
        raise UnsupportedModel(f"{cursor.label}: tensor {name!r} has the unknown type {number}") from None
    if kind not in FORMATS:
        raise UnsupportedModel(f"{cursor.label}: tensor {name!r} has type {kind.name}, which is not supported")
    block = FORMATS[kind]
    if sizes[0] % block.elements:
        raise cursor.fail(f"rows of {sizes[0]} values do not divide into {kind.name} blocks of {block.elements}")
    nbytes = sizes[0] // block.elements * block.bytes
    for size in sizes[1:]:
        nbytes *= size
    if nbytes > cursor.end:
        problem = f"shape {sizes[::-1]} takes {nbytes} bytes, the whole file has {cursor.end}"
        raise cursor.fail(f"{problem}; the file is cut off, or the shape is wrong")
    if offset % alignment:
        raise cursor.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
    return TensorInfo(name, kind, sizes[::-1], offset, nbytes)


def _check_extents(cursor: _Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    """Tensors lie inside the file and apart from each other."""
    end, previous = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.start):
        if tensor.start < end:
            raise ModelFileError(
                f"{cursor.label}: tensors {previous!r} and {tensor.name!r} overlap; the offsets or the type are wrong"
            )
        end, previous = tensor.start + tensor.nbytes, tensor.name
        if end > cursor.end:
            raise ModelFileError(
                f"{cursor.label}: the file is cut off in tensor {tensor.name!r}: "
                f"it ends at byte {end}, the file has {cursor.end}; download it again"
            )
