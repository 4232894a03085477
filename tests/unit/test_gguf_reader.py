"""The reader on well-formed files: the same contents as gguf-py sees, laziness, shards, closing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_bytes import FLOAT32, INT8, STRING, UINT16, UINT32, array, build, key, string

from dotllm.errors import ModelFileError
from dotllm.gguf.reader import GGUFFile

Tiny = Callable[..., Path]
SHARDED = ("model-00001-of-00003.gguf", "model-00002-of-00003.gguf", "model-00003-of-00003.gguf")


def same(ours: Any, theirs: Any) -> bool:
    return np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs


@pytest.mark.parametrize(("arch", "type"), [("qwen35", "F32"), ("gemma3", "Q8_0"), ("qwen35moe", "Q4_K")])
def test_sees_what_gguf_py_sees(tiny_gguf: Tiny, arch: str, type: str) -> None:
    path = tiny_gguf(arch, type)
    reference = gguf.GGUFReader(path)
    fields = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    with GGUFFile.open(path) as file:
        assert (file.version, file.alignment, file.size, file.shards) == (3, 32, path.stat().st_size, (path,))
        assert list(file.metadata) == list(fields)
        assert all(same(file.metadata[name], field.contents()) for name, field in fields.items())
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            ours = file.tensor(tensor.name)
            assert (ours.name, int(ours.type)) == (tensor.name, int(tensor.tensor_type))
            assert ours.shape == tuple(int(n) for n in tensor.shape[::-1])
            assert ours.rows * ours.row_bytes == len(ours.data) == tensor.n_bytes
            assert ours.data.ndim == 1
            np.testing.assert_array_equal(ours.data, np.asarray(tensor.data).view(np.uint8).reshape(-1))


def test_q2_0_which_gguf_py_cannot_open(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf("qwen35", "Q2_0")) as file:
        tensor = file.tensor("blk.0.ffn_up.weight")
        assert (tensor.type.name, tensor.shape, tensor.row_bytes) == ("Q2_0", (512, 256), 256 // 64 * 18)


def test_missing_tensor_and_missing_key(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf()) as file:
        with pytest.raises(ModelFileError, match=r"blk\.99\.attn_q\.weight"):
            file.tensor("blk.99.attn_q.weight")
        assert file.metadata.get("no.such.key") is None
        assert "no.such.key" not in file.metadata
        assert len(file.metadata) == len(list(file.metadata))


def test_data_cannot_be_written(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf()) as file, pytest.raises(ValueError, match="read-only"):
        file.tensor("output_norm.weight").data[:] = 255


def test_arrays_are_decoded_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(
        build(
            key("list", 9, array(STRING, [string("a"), string(b"\xff\xfe"), string("")], 3)),
            key("numbers", 9, array(INT8, [b"\x01\xff"], 2)),
            key("flags", 9, array(7, [b"\x00\x01"], 2)),
            key("empty", 9, array(STRING, [], 0)),
            key("text", STRING, string(b"caf\xe9")),
            key("real", FLOAT32, np.float32(0.5).tobytes()),
        )
    )
    file = GGUFFile.open(path)
    assert file.metadata["list"] == ["a", "��", ""]
    assert file.metadata["list"] is file.metadata["list"]
    assert file.metadata["text"] == "caf�"
    assert file.metadata["real"] == 0.5
    assert file.metadata["numbers"].tolist() == [1, -1]
    assert file.metadata["flags"].tolist() == [False, True]
    file.close()
    assert file.metadata["list"] == ["a", "��", ""]
    with pytest.raises(ModelFileError, match="'empty' was not read before"):
        file.metadata["empty"]


def test_closing_twice_and_with_tensors_alive(tiny_gguf: Tiny) -> None:
    file = GGUFFile.open(tiny_gguf())
    data = file.tensor("output_norm.weight").data
    expected = data.copy()
    file.close()
    file.close()
    assert not file.tensors
    np.testing.assert_array_equal(data, expected)


def test_version_2_and_other_alignment(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    data = bytes(range(128))
    alignment = key("general.alignment", UINT32, (64).to_bytes(4, "little"))
    path.write_bytes(build(alignment, tensors=[("t", (4, 8), 0, 0)], data=data, alignment=64, version=2))
    with GGUFFile.open(path) as file:
        assert (file.version, file.alignment) == (2, 64)
        assert file.tensor("t").shape == (8, 4)
        assert file.tensor("t").data.tobytes() == data


@pytest.mark.parametrize("tail", [-0, 5, 4096])
def test_padding_after_the_last_tensor_is_free(tmp_path: Path, tail: int) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(build(tensors=[("t", (5,), 0, 0)], data=bytes(20 + tail)))
    with GGUFFile.open(path) as file:
        assert len(file.tensor("t").data) == 20


# ---- what is not a model at all


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\n<!DOCTYPE html><html><head>", "looks like HTML"),
        (b"<html><body>404", "looks like HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "Git LFS pointer"),
        (b"PK\x03\x04zip archive......", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"GGUF", "cut off"),
        (b"GGUF\x00\x00\x00\x03" + bytes(64), "big-endian"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as error:
        GGUFFile.open(path)
    assert str(path) in str(error.value)


def test_paths_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="directory"):
        GGUFFile.open(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be opened"):
        GGUFFile.open("a\0b")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelFileError, match="not a regular file"):
            GGUFFile.open(tmp_path / "pipe")


# ---- shards


def write_shards(folder: Path, **changes: Any) -> list[Path]:
    """Three shards with one tensor each; `changes`: numbers, counts, totals, names, one a shard."""
    numbers, counts = changes.get("numbers", [0, 1, 2]), changes.get("counts", [3, 3, 3])
    totals, names = changes.get("totals", [3, 3, 3]), changes.get("names", ["a", "b", "c"])
    paths = []
    for i, name in enumerate(SHARDED):
        keys = [
            key("split.no", UINT16, numbers[i].to_bytes(2, "little")),
            key("split.count", UINT16, counts[i].to_bytes(2, "little")),
            key("split.tensors.count", 5, totals[i].to_bytes(4, "little")),
        ]
        paths.append(folder / name)
        paths[-1].write_bytes(build(*keys, tensors=[(names[i], (8,), 0, 0)], data=bytes([i]) * 32))
    return paths


def test_all_shards_are_read_from_the_first(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    with GGUFFile.open(paths[0]) as file:
        assert file.shards == tuple(paths)
        assert file.size == sum(path.stat().st_size for path in paths)
        assert {name: tensor.data.tolist() for name, tensor in file.tensors.items()} == {
            "a": [0] * 32,
            "b": [1] * 32,
            "c": [2] * 32,
        }


def test_another_shard_names_the_first(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"shard 2 of 3; give model-00001-of-00003\.gguf"):
        GGUFFile.open(write_shards(tmp_path)[1])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelFileError, match=r"model-00003-of-00003\.gguf is missing"):
        GGUFFile.open(paths[0])


def test_shards_joined_or_renamed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    joined = tmp_path / "model.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in paths))
    with pytest.raises(ModelFileError, match="must end in -00001-of-00003"):
        GGUFFile.open(joined)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numbers": [0, 2, 1]}, "expected shard 2 of 3"),
        ({"counts": [3, 3, 4]}, "expected shard 3 of 3"),
        ({"counts": [4, 3, 3]}, "must end in -00001-of-00004"),
        ({"totals": [4, 3, 3]}, "hold 3 tensors, split.tensors.count says 4"),
        ({"names": ["a", "b", "a"]}, "'a' is also in model-00001"),
    ],
)
def test_shards_that_disagree(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        GGUFFile.open(write_shards(tmp_path, **changes)[0])


def test_split_keys_of_the_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(key("split.count", STRING, string("3"))))
    with pytest.raises(ModelFileError, match=r"split\.count"):
        GGUFFile.open(path)
