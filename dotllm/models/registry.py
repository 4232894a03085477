"""From an open file to a model: one table from architecture name to class."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dotllm.errors import UnsupportedModel
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile
from dotllm.models.base import Loader, Model
from dotllm.models.gemma3 import Gemma3
from dotllm.models.llama import Llama
from dotllm.models.qwen35 import Qwen35
from dotllm.ops.protocol import Ops

__all__ = ["FAMILIES", "load_model"]

FAMILIES: Mapping[str, Callable[[Loader], Model]] = {
    "llama": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "gemma3": Gemma3,
    "qwen35": Qwen35,
    "qwen35moe": Qwen35,
    "qwen3next": Qwen35,
}


def load_model(file: GGUFFile, ops: Ops, *, context: int) -> Model:
    """Load every tensor of the file; positions up to `context` can be computed.

    Raises UnsupportedModel for an unknown architecture or a tensor that it does not use (without it the answers would
    be wrong), ModelFileError for a missing or misshapen tensor.
    """
    config = ModelConfig.from_gguf(file)
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{file.path}: architecture {config.architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    load = Loader(file, config, ops, context)
    model = family(load)
    if unused := load.unused():
        raise UnsupportedModel(
            f"{file.path}: this version of {config.architecture} does not know {len(unused)} of the tensors "
            f"({', '.join(unused[:4])}); without them the answers would be wrong"
        )
    return model
