"""Tokenizer and template keys of the wrong type: one of our errors, or a tokenizer that works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dotllm.errors import DotLLMError, ModelFileError
from dotllm.gguf.reader import GGUFFile
from dotllm.text.template import template_from_metadata
from dotllm.text.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."
KEYS = ("model", "pre", "tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id", "eot_token_id")
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
VALUES: dict[str, Any] = {
    "number": 7,
    "negative": -5,
    "2^64 - 1": (1 << 64) - 1,
    "fraction": 1.5,
    "NaN": float("nan"),
    "text": "abc",
    "no text": "",
    "boolean": True,
    "numbers": np.array([1, 2, 3]),
    "fractions": np.array([1.5, np.nan]),
    "no numbers": np.array([], np.int32),
    "texts": ["a", "b"],
}


def use(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode("Once <|im_end|>", add_special=True)
    tokenizer.decode(ids, special=True)


@pytest.mark.parametrize("vocab", ["bpe", "spm"])
def test_keys_of_any_type(tiny_gguf: Callable[..., Path], vocab: str) -> None:
    with GGUFFile.open(tiny_gguf("llama", "F32", vocab=vocab)) as file:
        good = dict(file.metadata)
    use(good)
    for key in (*KEYS, *FLAGS):
        for value in VALUES.values():
            try:
                use({**good, PREFIX + key: value})
            except DotLLMError:
                continue


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", VALUES["numbers"]),
        ("pre", VALUES["texts"]),
        ("eos_token_id", VALUES["text"]),
        ("eos_token_id", VALUES["NaN"]),
        ("bos_token_id", VALUES["numbers"]),
        ("add_bos_token", VALUES["numbers"]),
    ],
)
def test_the_error_names_the_key(tiny_gguf: Callable[..., Path], key: str, value: Any) -> None:
    with GGUFFile.open(tiny_gguf("llama", "F32")) as file:
        metadata = {**file.metadata, PREFIX + key: value}
    with pytest.raises(ModelFileError, match=re.escape(PREFIX + key)):
        use(metadata)


@pytest.mark.parametrize("name", [None, "tools"])
def test_templates_of_any_type(name: str | None) -> None:
    key = "tokenizer.chat_template" + (f".{name}" if name else "")
    for value in VALUES.values():
        for asked in {None, name}:
            if isinstance(value, str):
                assert template_from_metadata({key: value}, name=asked) == value
            else:
                with pytest.raises(ModelFileError, match=re.escape(key)):
                    template_from_metadata({key: value}, name=asked)
