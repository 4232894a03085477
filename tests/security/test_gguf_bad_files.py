"""Hostile and broken files: each raises ModelFileError and nothing else, before it costs time or memory."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import FLOAT32, INT8, STRING, UINT32, array, build, key, string, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dotllm.errors import ModelFileError, UnsupportedModel
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile

Tiny = Callable[..., Path]
F32, Q4_0 = 0, 2
HUGE, MINUS_ONE = 1 << 62, (1 << 64) - 1
ONE = ("t", (8,), F32, 0)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", INT8, 0)


BAD = {
    # header
    "magic": (build(magic=b"FUGG"), "not a GGUF file"),
    "version 0": (build(version=0), "version 0"),
    "version 1": (build(version=1), "version 1"),
    "version of the future": (build(version=4), "version 4 .* update dotllm"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "no tensor count": (build()[:8], "cut off"),
    "-1 tensors": (build(tensor_count=MINUS_ONE), "tensors do not fit"),
    "2^63 tensors": (build(tensor_count=1 << 63), "tensors do not fit"),
    "-1 keys": (build(key_count=MINUS_ONE), "keys do not fit"),
    "one key too many": (build(key("a", UINT32, u32(1)), key_count=2), "cut off"),
    "one tensor too many": (build(tensors=[ONE], data=bytes(32), tensor_count=2), "tensor table entry"),
    # keys
    "key longer than the file": (build(string("a", HUGE) + bytes(20), key_count=1), "a key has"),
    "key of 70000 bytes": (build(key("a" * 70000, UINT32, u32(1))), "a key has"),
    "empty key": (build(key("", UINT32, u32(1))), "a key is empty"),
    "key that is not UTF-8": (build(key(b"\xff\xfe", UINT32, u32(1))), "not UTF-8"),
    "key twice": (build(key("a", UINT32, u32(1)), key("a", UINT32, u32(2))), "twice"),
    "value type": (build(key("a", 13, u32(1))), "value type 13"),
    "value type -1": (build(key("a", 0xFFFFFFFF, u32(1))), "value type 4294967295"),
    "value cut off": (build(key("a", UINT32, b"\1\0")), "cut off"),
    "boolean 2": (build(key("a", 7, b"\2")), "boolean"),
    "string longer than the file": (build(key("a", STRING, string("abc", 1 << 20))), "cut off"),
    "string of 1 GiB": (build(key("a", STRING, string("abc", 1 << 30))), "a string has"),
    "string of 2^64 - 1": (build(key("a", STRING, string("abc", MINUS_ONE))), "a string has"),
    "array type": (build(key("a", 9, array(13, [], 0))), "value type 13"),
    "array of 2^62 bytes": (build(key("a", 9, array(INT8, [b"a"], HUGE))), "cut off"),
    "array count times width over 2^64": (build(key("a", 9, array(12, [b"a"], (1 << 61) + 1))), "cut off"),
    "array of 2^62 strings": (build(key("a", 9, array(STRING, [string("a")], HUGE))), "does not fit"),
    "string array cut off": (build(key("a", 9, array(STRING, [string("a")] * 9, 10)) + b"\1"), "array of strings"),
    "string array with a long string": (build(key("a", 9, array(STRING, [string("", HUGE)], 1))), "array of strings"),
    "string array with 2^64 - 1": (
        build(key("a", 9, array(STRING, [string("", MINUS_ONE), string("a"), string("b")], 3))),
        "array of strings",
    ),
    "array of arrays": (build(key("a", 9, nested(1))), "arrays of arrays"),
    "arrays 5000 deep": (build(key("a", 9, nested(5000))), "arrays of arrays"),
    # alignment
    "alignment 0": (build(key("general.alignment", UINT32, u32(0))), "alignment is 0"),
    "alignment 4": (build(key("general.alignment", UINT32, u32(4))), "alignment is 4"),
    "alignment 33": (build(key("general.alignment", UINT32, u32(33))), "alignment is 33"),
    "alignment 2^30": (build(key("general.alignment", UINT32, u32(1 << 30))), "alignment is 1073741824"),
    "alignment -32": (build(key("general.alignment", 5, struct.pack("<i", -32))), "alignment is -32"),
    "alignment as a string": (build(key("general.alignment", STRING, string("32"))), "must be a whole number"),
    "alignment as a float": (build(key("general.alignment", FLOAT32, u32(32))), "must be a whole number"),
    "alignment as a boolean": (build(key("general.alignment", 7, b"\1")), "must be a whole number"),
    "alignment as an array": (build(key("general.alignment", 9, array(INT8, [], 0))), "must be a whole number"),
    # tensor table
    "name of 65 bytes": (build(tensors=[("t" * 65, (8,), F32, 0)], data=bytes(32)), "tensor name has 65 bytes"),
    "empty name": (build(tensors=[("", (8,), F32, 0)], data=bytes(32)), "tensor name is empty"),
    "name that is not UTF-8": (build(tensors=[tensor(b"\xff", (8,), F32, 0)], data=bytes(32)), "not UTF-8"),
    "name twice": (build(tensors=[ONE, ("t", (8,), F32, 32)], data=bytes(64)), "appears twice"),
    "no dimensions": (build(tensors=[("t", (), F32, 0)], data=bytes(32)), "0 dimensions"),
    "5 dimensions": (build(tensors=[("t", (1,) * 5, F32, 0)], data=bytes(32)), "5 dimensions"),
    "2^31 dimensions": (build(tensors=[tensor("t", (8,), F32, 0, 1 << 31)], data=bytes(32)), "2147483648 dimensions"),
    "a dimension of zero": (build(tensors=[("t", (8, 0), F32, 0)], data=bytes(32)), "dimension is zero"),
    "a dimension of -1": (build(tensors=[("t", (MINUS_ONE,), F32, 0)], data=bytes(32)), "takes"),
    "2^62 values": (build(tensors=[("t", (1 << 31, 1 << 31), F32, 0)], data=bytes(32)), "takes"),
    "product that wraps to 0": (build(tensors=[("t", (1 << 32, 1 << 32), F32, 0)], data=bytes(32)), "takes"),
    "bytes that wrap": (build(tensors=[("t", ((1 << 62) + 8,), F32, 0)], data=bytes(32)), "takes"),
    "rows of half a block": (build(tensors=[("t", (48,), Q4_0, 0)], data=bytes(64)), "do not divide into Q4_0"),
    "type removed": (build(tensors=[("t", (32,), 4, 0)], data=bytes(64)), "Q4_2, which is not supported"),
    "type not supported": (build(tensors=[("t", (256,), 16, 0)], data=bytes(66)), "IQ2_XXS, which is not supported"),
    "type unknown": (build(tensors=[("t", (32,), 99, 0)], data=bytes(64)), "unknown type 99"),
    "type -1": (build(tensors=[("t", (32,), 0xFFFFFFFF, 0)], data=bytes(64)), "unknown type 4294967295"),
    "offset beside the alignment": (build(tensors=[("t", (8,), F32, 8)], data=bytes(64)), "offset 8 is not a multiple"),
    "offset behind the end": (build(tensors=[("t", (8,), F32, 1 << 20)], data=bytes(32)), "cut off in tensor 't'"),
    "offset that wraps": (build(tensors=[("t", (8,), F32, (1 << 64) - 32)], data=bytes(32)), "cut off in tensor 't'"),
    "tensors that overlap": (build(tensors=[("t", (16,), F32, 0), ("u", (8,), F32, 32)], data=bytes(96)), "overlap"),
    "alignment that the offsets do not keep": (
        build(key("general.alignment", UINT32, u32(64)), tensors=[("t", (8,), F32, 32)], data=bytes(96), alignment=64),
        "not a multiple of the alignment 64",
    ),
    "a byte short": (build(tensors=[ONE], data=bytes(31)), "cut off in tensor 't'"),
    "no data": (build(tensors=[ONE]), "cut off in tensor 't'"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_bad_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message) as error:
            GGUFFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)


def test_lies_in_a_large_file_cost_nothing(tmp_path: Path) -> None:
    """Counts are capped also where the size of the file, here a hole of 8 GiB, would allow them."""
    for content in (
        build(key("a", 9, array(STRING, [], 1 << 29))),
        build(key_count=1 << 28),
        build(tensor_count=1 << 26),
        build(key("a", STRING, string("", 1 << 32))),
    ):
        path = tmp_path / "hole.gguf"
        with path.open("wb") as file:
            file.write(content)
            file.truncate(8 << 30)
        tracemalloc.start()
        with pytest.raises(ModelFileError):
            GGUFFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
        tracemalloc.stop()


def test_unsupported_types_are_told_apart_from_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    for type in (4, 16, 40, 99):
        path.write_bytes(build(tensors=[("t", (256,), type, 0)], data=bytes(4096)))
        with pytest.raises(UnsupportedModel):
            GGUFFile.open(path)


def section_borders(path: Path) -> list[int]:
    """Offsets in the header, the tables and at the start, middle and end of tensors, some shifted by a byte."""
    size = path.stat().st_size
    with GGUFFile.open(path) as file:
        spans = [(tensor.name, len(tensor.data)) for tensor in file.tensors.values()]
        data = size - sum(-(-length // 32) * 32 for _, length in spans)
    cuts = [*range(1, 64), *range(64, data, 997), data - 1, data, data + 1]
    position = data
    for _, length in spans:
        cuts += [position + length // 2, position + length - 1]
        position += -(-length // 32) * 32
    return [*cuts, size // 2, size * 99 // 100]


def test_truncation_anywhere(tiny_gguf: Tiny, tmp_path: Path) -> None:
    whole = tiny_gguf("qwen35", "Q8_0")
    path = tmp_path / "cut.gguf"
    shutil.copy(whole, path)
    for cut in sorted(set(section_borders(whole)), reverse=True):
        with path.open("r+b") as file:
            file.truncate(cut)
        with pytest.raises(ModelFileError) as error:
            GGUFFile.open(path)
        if cut > 64:
            assert "cut off" in str(error.value)


def test_truncation_names_the_tensor(tiny_gguf: Tiny, tmp_path: Path) -> None:
    whole = tiny_gguf("qwen35", "Q8_0")
    with GGUFFile.open(whole) as file:
        last = list(file.tensors)[-1]
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ModelFileError, match=last.replace(".", r"\.")):
        GGUFFile.open(path)


def read_everything(path: Path) -> None:
    """What a program does with a file: anything but ModelFileError is a fault."""
    try:
        with GGUFFile.open(path) as file:
            for name in file.metadata:
                file.metadata[name]
            for tensor in file.tensors.values():
                assert len(tensor.data) == tensor.rows * tensor.row_bytes
            ModelConfig.from_gguf(file)
    except ModelFileError:
        pass


@given(
    arch=st.sampled_from(["qwen35", "gemma3"]),
    changes=st.lists(st.tuples(st.integers(0, 1 << 14), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4),
    length=st.one_of(st.none(), st.integers(0, 1 << 15)),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes(
    tiny_gguf: Tiny, tmp_path: Path, arch: str, changes: list[tuple[int, bytes]], length: int | None
) -> None:
    content = bytearray(tiny_gguf(arch).read_bytes())
    for position, new in changes:
        content[position : position + len(new)] = new
    path = tmp_path / "changed.gguf"
    path.write_bytes(content[:length])
    read_everything(path)


@given(st.binary(max_size=400))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_behind_a_good_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(build(tensor_count=1, key_count=2) + content)
    read_everything(path)
