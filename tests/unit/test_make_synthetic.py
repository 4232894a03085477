"""The generator of models of real sizes: what it writes at full size is checked on cut-down ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import make_synthetic
import numpy as np
import pytest

from dotllm.cli.logits import logits
from dotllm.engine.engine import Engine
from dotllm.engine.load import load_engine
from dotllm.engine.request import Request
from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile, Tensor
from dotllm.ops.select import select_ops

SMALL = {"embedding": 256, "feed_forward": 512, "heads": 4, "kv_heads": 2, "k_heads": 2, "vocab_size": 320, "layers": 4}
PARAMETERS = {  # of the main layers, in thousands of millions
    "qwen3.5-0.8b": 0.752,
    "qwen3.5-4b": 4.2,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.9,
    "qwen3.5-35b-a3b": 34.7,
}


def _values(tensor: Tensor) -> np.ndarray:
    return dequantize(tensor.data.reshape(tensor.rows, -1), tensor.type)


def _answer(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    events = engine.generate(Request(prompt, max_tokens=3, ignore_eos=True))
    return [event.token for event in events if event.token is not None]


@pytest.mark.parametrize(
    ("shape", "quant"),
    [
        ("qwen3.5-0.8b", "q4_k_m"),
        ("qwen3.5-27b", "q8_0"),
        ("qwen3.5-35b-a3b", "q4_0"),
        ("qwen3.5-9b", "q6_k"),
        ("llama-1b", "q4_k_m"),
    ],
)
def test_the_engine_answers_with_finite_numbers(tmp_path: Path, shape: str, quant: str) -> None:
    path = make_synthetic.make(tmp_path / "m.gguf", shape, quant, **{**SMALL, "experts": 8, "experts_used": 2})
    loaded = load_engine(path, select_ops("numpy"), context=16)
    assert (loaded.config.mtp is not None) == shape.startswith("qwen")
    assert loaded.config.file_type.lower() == quant
    events = []
    engine, plain = loaded.engine, loaded.engine._logits

    def watched(hidden: object, rows: object) -> np.ndarray:
        events.append(plain(hidden, rows))  # type: ignore[arg-type]
        return events[-1]

    engine._logits = watched  # type: ignore[method-assign, assignment]
    assert len(_answer(engine, (5, 70, 200))) == 3
    scores = np.concatenate(events)
    assert np.isfinite(scores).all()
    assert 0.5 < scores.std() < 15
    loaded.close()


def test_types_are_mixed_as_in_real_files(tmp_path: Path) -> None:
    path = make_synthetic.make(tmp_path / "m.gguf", "qwen3.5-9b", "q4_k_m", **{**SMALL, "layers": 8})
    with GGUFFile.open(path) as file:
        types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert types["output.weight"] == "Q6_K"
    assert types["token_embd.weight"] == types["blk.0.ffn_up.weight"] == types["blk.8.nextn.eh_proj.weight"] == "Q4_K"
    assert types["blk.0.attn_qkv.weight"] == "Q5_K"
    assert types["blk.0.ssm_alpha.weight"] == "Q8_0"
    assert {types[f"blk.0.{name}"] for name in ("attn_norm.weight", "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight")} == {
        "F32"
    }
    downs = [types[f"blk.{i}.ffn_down.weight"] for i in range(9)]
    assert downs[0] == downs[-1] == "Q6_K"
    assert 3 <= downs.count("Q4_K") <= 6
    tied = make_synthetic.make(tmp_path / "t.gguf", "qwen3.5-0.8b", "q4_k_m", **SMALL)
    with GGUFFile.open(tied) as file:
        assert "output.weight" not in file.tensors
        assert file.tensor("token_embd.weight").type.name == "Q6_K"


@pytest.mark.parametrize("quant", make_synthetic.QUANTS)
def test_blocks_look_like_quantised_normal_numbers(tmp_path: Path, quant: str) -> None:
    path = make_synthetic.make(tmp_path / "m.gguf", "qwen3.5-9b", quant, **SMALL)
    with GGUFFile.open(path) as file:
        for name in ("blk.0.attn_qkv.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "output.weight"):
            values = _values(file.tensor(name))
            wanted = (3.0 if name == "output.weight" else 1.5) / np.sqrt(values.shape[1])
            assert 0.9 < values.std() / wanted < 1.1
            assert abs(values.mean()) < 0.15 * wanted
            assert len(np.unique(values, axis=0)) == len(values)  # rows that are alike would tie for the best token


def test_layers_share_no_matrix(tmp_path: Path) -> None:
    with GGUFFile.open(make_synthetic.make(tmp_path / "m.gguf", "llama-1b", "q8_0", **SMALL)) as file:
        first, second = (file.tensor(f"blk.{i}.ffn_up.weight").data for i in range(2))
        assert not np.array_equal(first, second)


def test_a_predictive_head_passes_the_embedding_on(tmp_path: Path) -> None:
    path = make_synthetic.make(tmp_path / "m.gguf", "qwen3.5-0.8b", "q4_k_m", predictive=0.02, **SMALL)
    with GGUFFile.open(path) as file:
        assert "output.weight" in file.tensors
        projection = _values(file.tensor("blk.4.nextn.eh_proj.weight"))
        np.testing.assert_allclose(np.diagonal(projection), 1.0, atol=0.02)
        assert np.abs(projection[:, :256] - np.eye(256)).max() < 0.1
        branch = _values(file.tensor("blk.0.ffn_down.weight"))
        assert 0.8 < branch.std() / (0.02 * 1.5 / np.sqrt(512)) < 1.2
        norms = (file.tensor(name).data for name in ("blk.4.nextn.shared_head_norm.weight", "output_norm.weight"))
        assert np.array_equal(*norms)


def test_an_mtp_head_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, sizes = make_synthetic.SHAPES["qwen3.5-0.8b"]
    small = {"qwen3.5-0.8b": (arch, dataclasses.replace(sizes, **SMALL))}
    monkeypatch.setattr(make_synthetic, "SHAPES", small)  # the whole one has a vocabulary of 250,000
    make_synthetic.main([str(tmp_path / "m.gguf"), "--shape", "qwen3.5-0.8b", "--no-mtp", "--layers", "2"])
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert not [name for name in file.tensors if "nextn" in name]
        assert ModelConfig.from_gguf(file).mtp is None


@pytest.mark.parametrize("predictive", [0.02, None])
def test_drafts_of_a_predictive_head_are_often_right(tmp_path: Path, predictive: float | None) -> None:
    path = make_synthetic.make(tmp_path / "m.gguf", "qwen3.5-0.8b", "q4_k_m", predictive=predictive, **SMALL)
    best = []
    for mtp in (False, True):
        out = tmp_path / "logits.npy"
        logits(out, str(path), tokens=",".join(map(str, range(40, 88))), mtp=mtp, backend="numpy")
        best.append(np.load(out).argmax(-1))
    agreed = (best[0] == best[1]).mean()
    assert agreed > 0.5 if predictive else agreed < 0.2
    assert len(set(best[0])) > 10  # not one word again and again


@pytest.mark.parametrize("shape", PARAMETERS)
def test_sizes_are_those_of_the_models(shape: str) -> None:
    arch, sizes = make_synthetic.SHAPES[shape]
    width = sizes.embedding
    v_width = sizes.state * sizes.k_heads * sizes.v_per_k
    recurrent = width * (2 * sizes.state * sizes.k_heads + 3 * v_width)
    attention = width * sizes.head_dim * (3 * sizes.heads + 2 * sizes.kv_heads)
    experts = sizes.experts + 1 if arch == "qwen35moe" else 1
    layer = recurrent * 0.75 + attention * 0.25 + 3 * width * sizes.feed_forward * experts
    total = layer * sizes.layers + (1 + sizes.untied) * sizes.vocab_size * width
    assert total / 1e9 == pytest.approx(PARAMETERS[shape], rel=0.02)


def test_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    with pytest.raises(SystemExit):
        make_synthetic.main([str(out), "--shape", "qwen3.5-7b"])
    with pytest.raises(SystemExit):
        make_synthetic.main([str(out), "--shape", "qwen3.5-0.8b", "--no-mtp", "--predictive", "0.1"])
    with pytest.raises(ValueError, match="do not divide"):
        make_synthetic.make(out, "llama-1b", "q4_k_m", **{**SMALL, "embedding": 192})
    with pytest.raises(ValueError, match="needed"):
        make_synthetic.make(out, "llama-1b", "q5_1")
