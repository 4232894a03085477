"""Loading uses every tensor of a file, or says why it does not; a matrix may come in one piece with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from numpy.typing import NDArray

from dotllm.errors import UnsupportedModel
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile, Tensor
from dotllm.gguf.types import GGMLType
from dotllm.models.base import Loader
from dotllm.models.layers import ExpertFeedForward, GatedDeltaNet
from dotllm.models.registry import load_model
from dotllm.ops.reference import NumpyOps

Tiny = Callable[..., Path]


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "rope_factors_long.weight", "blk.x.weight"])
def test_a_tensor_that_nothing_reads_is_refused(tiny_gguf: Tiny, name: str) -> None:
    with GGUFFile.open(tiny_gguf("qwen3")) as file:
        load_model(file, NumpyOps(), context=32)
        file.tensors = MappingProxyType({**file.tensors, name: file.tensor("output_norm.weight")})
        with pytest.raises(UnsupportedModel, match=name):
            load_model(file, NumpyOps(), context=32)


def test_mtp_blocks_that_cannot_be_used_are_no_reason_to_refuse(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf("qwen35")) as file:
        whole = load_model(file, NumpyOps(), context=32)
        assert whole.mtp is not None
        head = f"blk.{len(whole.config.layers)}.nextn.eh_proj.weight"
        file.tensors = MappingProxyType({name: t for name, t in file.tensors.items() if name != head})
        model = load_model(file, NumpyOps(), context=32)
        assert model.mtp is None
        assert head in model.config.mtp_note


def merged(file: GGUFFile, name: str, parts: Sequence[NDArray[np.float32]], axis: int) -> None:
    """Put a tensor into the file: `parts` side by side."""
    values = np.ascontiguousarray(np.concatenate(parts, axis=axis))
    tensor = Tensor(name, GGMLType.F32, values.shape, values.view(np.uint8).reshape(-1))
    file.tensors = MappingProxyType({**file.tensors, name: tensor})


def values(file: GGUFFile, name: str) -> NDArray[np.float32]:
    return NumpyOps().load(file.tensor(name)).values


def test_merged_projections_are_the_same_as_single_ones(tiny_gguf: Tiny) -> None:
    """One key head after another: its queries, keys, value heads and their gates."""
    with GGUFFile.open(tiny_gguf("qwen3next")) as file:
        config = ModelConfig.from_gguf(file)
        r = config.recurrent
        assert r is not None
        single = GatedDeltaNet(Loader(file, config, NumpyOps(), 32), "blk.0.", r, 0)
        parts = np.split(values(file, "blk.0.attn_qkv.weight"), [r.key_width, 2 * r.key_width])
        parts.append(values(file, "blk.0.attn_gate.weight"))
        heads = [part.reshape(r.k_heads, -1, config.embedding_length) for part in parts]
        merged(file, "blk.0.ssm_in.weight", [head[i] for i in range(r.k_heads) for head in heads], 0)
        whole = GatedDeltaNet(Loader(file, config, NumpyOps(), 32), "blk.0.", r, 0)
    np.testing.assert_array_equal(whole.qkv.values, single.qkv.values)
    np.testing.assert_array_equal(whole.z.values, single.z.values)


def test_merged_experts_are_the_same_as_single_ones(tiny_gguf: Tiny) -> None:
    with GGUFFile.open(tiny_gguf("qwen35moe")) as file:
        config = ModelConfig.from_gguf(file)
        single = ExpertFeedForward(Loader(file, config, NumpyOps(), 32), "blk.0.")
        parts = [values(file, f"blk.0.ffn_{name}_exps.weight") for name in ("gate", "up")]
        merged(file, "blk.0.ffn_gate_up_exps.weight", parts, 1)
        whole = ExpertFeedForward(Loader(file, config, NumpyOps(), 32), "blk.0.")
    np.testing.assert_array_equal(whole.gate.values, single.gate.values)
    np.testing.assert_array_equal(whole.up.values, single.up.values)
