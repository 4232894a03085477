"""GGUF files as memory-mapped tensors and metadata, from one file or a set of shards."""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
from numpy.typing import NDArray

from dotllm.errors import ModelFileError
from dotllm.gguf.parse import Header, Metadata, TensorInfo, parse_header
from dotllm.gguf.types import GGMLType

__all__ = ["GGUFFile", "Tensor"]

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: `shape` outermost dimension first, `data` its bytes, 1-D uint8, read-only, in the file."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def rows(self) -> int:
        """How many rows of `shape[-1]` values there are."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return len(self.data) // self.rows


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    data: mmap.mmap
    header: Header

    def tensor(self, info: TensorInfo, buffer: NDArray[np.uint8]) -> Tensor:
        return Tensor(info.name, info.type, info.shape, buffer[info.start : info.start + info.nbytes])


class GGUFFile:
    """An open model: `metadata`, `tensors`, and where they came from. Use `GGUFFile.open`, best in a `with` block."""

    path: Path
    version: int
    alignment: int
    size: int
    """Bytes of all shards together."""
    shards: tuple[Path, ...]
    metadata: Metadata
    tensors: Mapping[str, Tensor]

    def __init__(self, shards: list[_Shard]) -> None:
        header = shards[0].header
        self.path = shards[0].path
        self.version = header.version
        self.alignment = header.alignment
        self.shards = tuple(shard.path for shard in shards)
        self.size = sum(len(shard.data) for shard in shards)
        self.metadata = header.metadata
        self.tensors = MappingProxyType(_collect(shards))
        self._maps = [shard.data for shard in shards]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Map a model file, or all shards if it is the first of a set, and check every extent in it.

        Raises ModelFileError for anything that is not a whole, well-formed model file; UnsupportedModel for a tensor
        type that cannot be read.
        """
        shards: list[_Shard] = []
        try:
            shards.append(_open_shard(Path(path)))
            shards.extend(map(_open_shard, _other_shards(shards[0])))
            if len(shards) > 1:
                _check_set(shards)
            return cls(shards)
        except BaseException:
            for shard in shards:
                shard.data.close()
            raise

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; raises ModelFileError if the file lacks it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing") from None

    def close(self) -> None:
        """Let go of the mapping. Memory of tensors that are still referenced stays valid until they are dropped."""
        self.tensors = MappingProxyType({})
        for data in self._maps:
            try:
                data.close()
            except BufferError:  # somebody holds a tensor; the mapping ends with the last one
                continue
        self._maps = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _collect(shards: list[_Shard]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        buffer = np.frombuffer(shard.data, np.uint8)
        for info in shard.header.tensors:
            tensors[info.name] = shard.tensor(info, buffer)
    return tensors


def _open_shard(path: Path) -> _Shard:
    data = _map(path)
    try:
        return _Shard(path, data, parse_header(data, str(path)))
    except BaseException:
        data.close()
        raise


def _map(path: Path) -> mmap.mmap:
    """Map a file to read: its pages can be dropped and read again, and no system counts them as memory in use."""
    try:
        status = path.stat()  # before opening: opening a pipe would wait for a writer
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: a directory; give the .gguf file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty; download it again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be opened: {error}") from error


def _split_number(shard: _Shard, key: str) -> int | None:
    value = shard.header.metadata.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ModelFileError(f"{shard.path}: key {key!r} must be a whole number, not {value!r}")
    return value


def _other_shards(first: _Shard) -> list[Path]:
    """Paths of shards 2..N if `first` is shard 1 of N > 1, after checking that they are there."""
    path, number, count = first.path, _split_number(first, "split.no") or 0, _split_number(first, "split.count") or 0
    if count <= 1:
        return []
    match = _SHARD_NAME.fullmatch(path.name)
    if number != 0:
        start = f"{match['stem'] if match else '...'}-00001-of-{count:05d}.gguf"
        raise ModelFileError(f"{path}: this is shard {number + 1} of {count}; give {start}")
    if not match or int(match["count"]) != count or int(match["index"]) != 1:
        raise ModelFileError(
            f"{path}: this is shard 1 of {count}, so its name must end in -00001-of-{count:05d}.gguf, "
            "beside the others (shards cannot be joined by appending them)"
        )
    others = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    for other in others:
        if not other.is_file():
            raise ModelFileError(f"{path}: shard {other.name} is missing; download all {count} shards")
    return others


def _check_set(shards: list[_Shard]) -> None:
    """Shards know their place, agree on the count, and hold each tensor once."""
    count = len(shards)
    owners: dict[str, Path] = {}
    for index, shard in enumerate(shards):
        found = _split_number(shard, "split.no"), _split_number(shard, "split.count")
        if found != (index, count) and not (index == 0 and found == (None, count)):
            raise ModelFileError(
                f"{shard.path}: expected shard {index + 1} of {count}, but split.no and split.count are {found}"
            )
        for tensor in shard.header.tensors:
            if tensor.name in owners:
                raise ModelFileError(
                    f"{shard.path}: tensor {tensor.name!r} is also in {owners[tensor.name].name}; shards of two models?"
                )
            owners[tensor.name] = shard.path
    expected = _split_number(shards[0], "split.tensors.count")
    if expected is not None and expected != len(owners):
        raise ModelFileError(
            f"{shards[0].path}: the {count} shards hold {len(owners)} tensors, split.tensors.count says {expected}; "
            "download them again"
        )
