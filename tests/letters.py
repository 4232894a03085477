"""A tokenizer for tests: token 10 + i is the character 'a' + i, lower ids are nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Letters"]


@dataclass(frozen=True)
class Letters:
    end_ids: Collection[int] = ()

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        return chr(ord("a") + token_id - 10).encode(errors="replace") if token_id >= 10 else b""
