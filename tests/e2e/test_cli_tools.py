"""`inspect`, `tokenize`, `logits` and `trace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import Run

from dotllm.cli.locate import demo_model

NUMPY = ("--backend", "numpy")


def test_inspect_shows_a_file_without_loading_it(cli: Run) -> None:
    result = cli("inspect")
    assert (result.code, result.err) == (0, "")
    for words in ("123 tensors", "8 (6 recurrent, 2 attention)", "MTP head           yes", "Q8_0        71 tensors"):
        assert words in result.out
    assert "... 4096 in all" in result.out
    assert "output_norm.weight" not in result.out
    assert cli("show", "--filter", r"output_norm").out.count("output_norm.weight") == 1


def test_inspect_as_json(cli: Run, tiny_gguf: Callable[..., Path]) -> None:
    report = json.loads(cli("inspect", "--json", "--filter", r"^blk\.0\.|general").out)
    assert report["mtp_head"] is True
    assert report["config"]["architecture"] == "qwen35"
    assert report["metadata"]["general.architecture"] == "qwen35"
    assert all(tensor["name"].startswith("blk.0.") for tensor in report["tensors"])
    assert sum(t["bytes"] for t in report["types"].values()) <= report["size"]
    plain = json.loads(cli("inspect", "--json", str(tiny_gguf("llama", "F32"))).out)
    assert plain["mtp_head"] is False
    assert plain["mtp_note"]
    whole = json.loads(cli("inspect", "--json", "--metadata", "--filter", "ggml.tokens$").out)
    assert len(whole["metadata"]["tokenizer.ggml.tokens"]) == 4096


def test_inspect_of_what_cannot_be_run_or_read(cli: Run, tmp_path: Path) -> None:
    data = demo_model().read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace(b"qwen35", b"qwen99", 1))  # general.architecture comes first
    result = cli("inspect", str(other))
    assert result.code == 0
    assert "Not a model that can be run" in result.out
    assert "qwen99" in result.out
    other.write_bytes(data[:1000])
    assert cli("inspect", str(other)).code == 3
    assert cli("inspect", "--filter", "(").code == 2


def test_tokens_and_their_pieces(cli: Run) -> None:
    model = str(demo_model())
    result = cli("tokenize", model, "The <|im_end|> Ω")
    ids = cli("tokenize", "-m", model, "The <|im_end|> Ω", "--ids").out.strip().split(",")
    assert [line.split()[0] for line in result.out.splitlines()] == ids
    assert "gives" not in result.out
    assert "decoding them gives the text back" in result.err
    report = json.loads(cli("tokenize", model, "--json", stdin="The <|im_end|> Ω").out)
    assert [str(token["id"]) for token in report["tokens"]] == ids
    assert report["round_trip"] is True
    assert any(token["piece"] == "<|im_end|>" for token in report["tokens"])
    plain = json.loads(cli("tokenize", model, "<|im_end|>", "--json", "--no-special").out)
    assert plain["count"] > 1


def test_logits_do_not_depend_on_the_chunk(cli: Run, tmp_path: Path) -> None:
    def rows(*arguments: str) -> np.ndarray:
        path = tmp_path / "x.npy"
        result = cli("logits", *NUMPY, "--out", str(path), *arguments)
        assert (result.code, result.out) == (0, ""), result.err
        return np.load(path)

    tokens = "200,45,77,1000,2,9"
    whole = rows("--tokens", tokens)
    assert whole.shape == (6, 4096)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, rows("--tokens", tokens, "--chunk", "4"))
    head = rows("--tokens", tokens, "--mtp")
    assert head.shape == whole.shape
    assert abs(head - whole).max() > 0.1
    np.testing.assert_array_equal(head, rows("--tokens", tokens, "--mtp", "--chunk", "1"))
    text = rows("--text", "Once upon a time")
    report = json.loads(cli("run", *NUMPY, "--json", "-n", "1", "-ctk", "f32", "-ctv", "f32").out)
    assert [int(text[-1].argmax())] == report["tokens"]


def test_logits_refuses_what_it_cannot_do(cli: Run, tmp_path: Path, tiny_gguf: Callable[..., Path]) -> None:
    out = ("--out", str(tmp_path / "x.npy"))
    for arguments in (
        (),
        ("--tokens", "1", "--text", "x"),
        ("--tokens", "one"),
        ("--tokens", "4096"),
        ("--tokens", "-1"),
        ("--text", ""),
        ("--tokens", "1", "--chunk", "0"),
        (str(tiny_gguf("llama", "F32")), "--tokens", "1", "--mtp"),
    ):
        result = cli("logits", *NUMPY, *out, *arguments)
        assert result.code == 2, arguments
    assert cli("logits", *NUMPY, "--tokens", "1", "--out", str(tmp_path / "no" / "x.npy")).code == 1
    assert list(tmp_path.iterdir()) == []


def test_trace_lists_every_op(cli: Run) -> None:
    calls = json.loads(cli("trace", *NUMPY, "--json", "-p", "Once upon").out)["ops"]
    linear = [tensor for call in calls if call["op"] == "linear" for tensor in call["tensors"]]
    assert {"blk.0.ssm_out.weight", "blk.3.attn_q.weight", "blk.7.ffn_down.weight", "token_embd.weight"} <= set(linear)
    (attention, _) = (call for call in calls if call["op"] == "attention")
    (out,) = attention["outputs"]
    assert out["shape"] == [2, 4, 64]
    assert out["min"] < out["mean"] < out["max"]
    assert all(call["ms"] >= 0 for call in calls)
    text = cli("trace", *NUMPY, "-p", "Once upon").out
    assert "gated_delta" in text
    assert "6 calls" in text


def test_trace_finds_where_two_backends_part(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    same = cli("trace", "--compare", "numpy", "numpy", "-p", "Once upon")
    assert same.code == 0
    assert "no op parts" in same.out
    from dotllm.ops.reference import NumpyOps

    runs = 0

    def off(self: NumpyOps, x: np.ndarray, weight: np.ndarray, z: np.ndarray, eps: float) -> None:
        nonlocal runs
        runs += 1
        right(self, x, weight, z, eps)
        x *= 1.0 if runs <= 6 else 1.5  # six layers: the second run is wrong from its first layer on

    right = NumpyOps.gated_norm
    monkeypatch.setattr(NumpyOps, "gated_norm", off)
    result = cli("trace", "--compare", "numpy", "numpy", "-p", "Once upon", "--json")
    assert result.code == 1
    assert "gated_norm" in result.err
    first = json.loads(result.out)["first_apart"]
    assert first["op"] == "gated_norm"
    assert first["tensors"] == ["blk.0.ssm_norm.weight"]


def test_a_lone_argument_is_the_text_unless_it_names_a_model(cli: Run) -> None:
    assert cli("tokenize", "Once upon a time", "--ids").out == "2843,664,258,524\n"
    assert cli("tokenize", "nowhere.gguf", "--ids").code == 3
