"""Metadata that ask for far larger layers than the file holds: told from the shapes, before memory is spent on them."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from dotllm.errors import ModelFileError
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile
from dotllm.models.base import Loader
from dotllm.models.layers import Attention, ExpertFeedForward, GatedDeltaNet
from dotllm.ops.reference import NumpyOps

MANY = 1 << 22
BUDGET = 16 << 20


@pytest.mark.parametrize("arch", ["qwen35", "qwen3next", "qwen35moe"])
def test_layers_far_larger_than_their_tensors(tiny_gguf: Callable[..., Path], arch: str) -> None:
    with GGUFFile.open(tiny_gguf(arch)) as file:
        true = ModelConfig.from_gguf(file)
        small = file.tensor("output_norm.weight")
        if arch != "qwen35":  # the forms with merged tensors
            merged = ("blk.0.ssm_in.weight", "blk.0.ffn_gate_up_exps.weight")
            file.tensors = MappingProxyType({**file.tensors, **dict.fromkeys(merged, small)})
        assert true.recurrent is not None
        recurrent = dataclasses.replace(true.recurrent, state_size=MANY)
        experts = true.experts and dataclasses.replace(true.experts, feed_forward_length=MANY)
        config = dataclasses.replace(true, head_dim=MANY, recurrent=recurrent, experts=experts)
        load = Loader(file, config, NumpyOps(), context=32)
        attention = next(i for i, layer in enumerate(true.layers) if layer.kind == "attention")
        layers: list[Callable[[], object]] = [
            lambda: Attention(load, f"blk.{attention}.", config.layers[attention]),
            lambda: GatedDeltaNet(load, "blk.0.", recurrent, 0),
        ]
        if experts:
            layers.append(lambda: ExpertFeedForward(load, "blk.0."))
        for layer in layers:
            tracemalloc.start()
            try:
                with pytest.raises(ModelFileError, match="has shape"):
                    layer()
                assert tracemalloc.get_traced_memory()[1] < BUDGET
            finally:
                tracemalloc.stop()
