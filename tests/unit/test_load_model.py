"""Loading uses every tensor of a file, or says why it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from dotllm.errors import UnsupportedModel
from dotllm.gguf.reader import GGUFFile
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
