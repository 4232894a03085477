"""The generator of tiny models: reproducible files, valid vocabularies, every tensor type, the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import make_tiny_gguf
import numpy as np
import pytest

from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.hparams import ARCHITECTURES, ModelConfig
from dotllm.gguf.reader import GGUFFile
from dotllm.gguf.types import FORMATS

Tiny = Callable[..., Path]
WEIGHT_TYPES = [type.name for type, block in FORMATS.items() if block.elements > 1 or ("F" in type.name and type != 28)]


def test_the_generator_knows_every_architecture() -> None:
    assert make_tiny_gguf.ARCHITECTURES == ARCHITECTURES


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    first = make_tiny_gguf.make(tmp_path / "a.gguf", "qwen35", "Q4_0", seed=3).read_bytes()
    assert make_tiny_gguf.make(tmp_path / "b.gguf", "qwen35", "Q4_0", seed=3).read_bytes() == first
    assert make_tiny_gguf.make(tmp_path / "c.gguf", "qwen35", "Q4_0", seed=4).read_bytes() != first


@pytest.mark.parametrize("type", WEIGHT_TYPES)
def test_every_type(tiny_gguf: Tiny, type: str) -> None:
    with GGUFFile.open(tiny_gguf("qwen35", type, layers=2, vocab_size=300)) as file:
        for name in ("token_embd.weight", "blk.0.attn_qkv.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight"):
            tensor = file.tensor(name)
            assert tensor.type.name == type
            values = dequantize(tensor.data.reshape(tensor.rows, -1), tensor.type)
            assert values.shape == tensor.shape
            assert 0.1 < values.std() / (0.4 if name.startswith("token") else 1.5 / np.sqrt(tensor.shape[1])) < 2
        assert file.tensor("blk.0.ssm_conv1d.weight").type.name == "F32"
        assert ModelConfig.from_gguf(file).file_type == type


def test_byte_level_vocabulary(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf()) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == len(set(tokens)) == len(file.metadata["tokenizer.ggml.token_type"]) == 304
        for merge in file.metadata["tokenizer.ggml.merges"]:
            left, right = merge.split(" ")
            assert {left, right, left + right} <= set(tokens)
        assert tokens[file.metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
        assert file.metadata["tokenizer.ggml.pre"] == "qwen35"


def test_sentencepiece_vocabulary(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf("gemma3", vocab="spm")) as file:
        tokens, types = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
        scores = file.metadata["tokenizer.ggml.scores"]
        assert len(tokens) == len(set(tokens)) == len(types) == len(scores) == file.tensor("token_embd.weight").shape[0]
        assert [tokens[i] for i in np.flatnonzero(types == 6)] == [f"<0x{byte:02X}>" for byte in range(256)]
        pieces = [tokens[i] for i in np.flatnonzero(types == 1)]
        for piece in pieces:
            halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
            assert len(piece) == 1 or any(left in pieces and right in pieces for left, right in halves)
        assert file.metadata["tokenizer.ggml.model"] == "llama"


def test_overrides_and_metadata(tiny_gguf: Tiny) -> None:
    path = tiny_gguf("qwen35", "Q8_0", overrides={"ssm_alpha.weight": "F16"}, metadata={"general.license": "none"})
    with GGUFFile.open(path) as file:
        assert file.tensor("blk.0.ssm_alpha.weight").type.name == "F16"
        assert file.metadata["general.license"] == "none"


def test_predictive_head_shares_the_final_norm(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf("qwen35", predictive=0.02)) as file:
        final = file.tensor("output_norm.weight").data
        np.testing.assert_array_equal(file.tensor("blk.4.nextn.shared_head_norm.weight").data, final)
        assert "output.weight" in file.tensors


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    make_tiny_gguf.main([str(out), "--arch", "gemma3", "--type", "Q8_0", "--set", "layers=2", "--set", "vocab=spm"])
    with GGUFFile.open(out) as file:
        config = ModelConfig.from_gguf(file)
    assert (config.architecture, len(config.layers), config.file_type) == ("gemma3", 2, "Q8_0")


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mamba"):
        make_tiny_gguf.make(tmp_path / "a.gguf", "mamba")
