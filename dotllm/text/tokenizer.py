"""The tokenizer of a GGUF file: text to token ids and back.

Special tokens are split off first, longest first; the text between them goes to the merge engine. There is no Unicode
normalisation: the bytes that go in come out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from dotllm.errors import UsageError
from dotllm.text.build import load_or_build_engine
from dotllm.text.marks import MarkedText
from dotllm.text.sentencepiece import SPACE
from dotllm.text.vocabulary import END_TEXTS, PREFIX, TokenKind, Vocabulary

__all__ = ["SpecialToken", "Tokenizer"]


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token with a meaning of its own; a `control` one is matched only where special tokens are asked for."""

    text: str
    token_id: int
    control: bool


class Tokenizer:
    """Text to ids and ids to bytes, for one vocabulary. Immutable, and safe to share between threads."""

    def __init__(self, metadata: Mapping[str, Any], vocabulary: Vocabulary, engine: tokenizers.Tokenizer) -> None:
        self._metadata = metadata
        self._vocabulary = vocabulary
        self._engine = engine
        self._byte_of = {char: byte for byte, char in _printable_bytes().items()}
        special_kinds = (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED)
        ids = [token_id for token_id, kind in enumerate(vocabulary.kinds) if kind in special_kinds]
        texts = {token_id: self.token_text(token_id) for token_id in ids}
        self.end_ids = vocabulary.end_ids | {token_id for token_id, text in texts.items() if text in END_TEXTS}
        # A token that ends the reply is control whatever the file calls it: its text is never part of the reply.
        self._control = self.end_ids | {i for i in ids if vocabulary.kinds[i] != TokenKind.USER_DEFINED}
        specials = [SpecialToken(text, i, i in self._control) for i, text in texts.items() if text]
        self.specials = tuple(sorted(specials, key=lambda special: -len(special.text.encode())))

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], *, cache_dir: Path | None = None, fingerprint: bytes | None = None
    ) -> Tokenizer:
        """Build from the metadata of a GGUF file.

        With `cache_dir` and a `fingerprint` of the metadata (any bytes that change when the file does) an engine that
        is slow to build is kept on disk and later starts load it. Raises UnsupportedModel or ModelFileError.
        """
        vocabulary = Vocabulary.from_metadata(metadata)
        return cls(metadata, vocabulary, load_or_build_engine(metadata, vocabulary, cache_dir, fingerprint))

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def bos(self) -> int | None:
        return self._vocabulary.bos

    @property
    def eos(self) -> int | None:
        return self._vocabulary.eos

    @property
    def add_bos(self) -> bool:
        return self._vocabulary.add_bos

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS and EOS where the file asks for them. Control tokens written out in the text are matched
        only with `parse_special`; user-defined ones always.
        """
        return self._framed(self._pieces(_well_formed(text), parse_special), add_special)

    def encode_chat(self, rendered: MarkedText) -> list[int]:
        """Token ids of a rendered conversation, with BOS if the file asks for it and the template did not write it.

        Special tokens count only where the template wrote them: literals inside messages carry a mark (see `marks`)
        that keeps them from matching, and become plain text.
        """
        pieces = self._pieces(_well_formed(rendered.text), parse_special=True)
        plain = [piece.replace(rendered.mark, "") if isinstance(piece, str) else piece for piece in pieces]
        starts_with_bos = bool(plain) and plain[0] == self.bos
        return self._framed([piece for piece in plain if piece != ""], add_special=not starts_with_bos, add_eos=False)

    def _framed(self, pieces: Iterable[str | int], add_special: bool, add_eos: bool = True) -> list[int]:
        vocabulary = self._vocabulary
        ids: list[int] = []
        if add_special and vocabulary.add_bos and vocabulary.bos is not None:
            ids.append(vocabulary.bos)
        after_special = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_plain(piece, after_special)
            after_special = isinstance(piece, int)
        if add_special and add_eos and vocabulary.add_eos and vocabulary.eos is not None:
            ids.append(vocabulary.eos)
        return ids

    def _encode_plain(self, text: str, after_special: bool) -> list[int]:
        if self._vocabulary.sentencepiece:
            prefix = " " if after_special and self._vocabulary.add_space_prefix else ""
            text = (prefix + text).replace(" ", SPACE)
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        if max(ids, default=0) < self._vocabulary.size:
            return ids
        return [known for token_id in ids for known in self._spelled_out(token_id)]

    def _spelled_out(self, token_id: int) -> list[int]:
        """A piece that merging passes through but that is no token, as its single characters."""
        if token_id < self._vocabulary.size:
            return [token_id]
        characters = [self._engine.token_to_id(char) for char in self._engine.id_to_token(token_id) or ""]
        return [char_id for char_id in characters if char_id is not None]

    def _pieces(self, text: str, parse_special: bool) -> list[str | int]:
        """Text cut at special tokens: strings, and ids where a special token stood."""
        pieces: list[str | int] = [text] if text else []
        for special in self.specials:
            if (special.control and not parse_special) or special.text not in text:
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                for number, part in enumerate(piece.split(special.text)):
                    if number:
                        cut.append(special.token_id)
                    if part:
                        cut.append(part)
            pieces = cut
        return pieces

    def token_text(self, token_id: int) -> str:
        """The token as the file spells it; raises UsageError for an id outside the vocabulary."""
        self._check(token_id)
        text: str | None = self._engine.id_to_token(token_id)
        # Of two tokens with one text the engine knows only the last.
        return text if text is not None else str(self._metadata[PREFIX + "tokens"][token_id])

    def token_id(self, text: str) -> int | None:
        """The id of the token that the file spells `text`, or None."""
        found: int | None = self._engine.token_to_id(text)
        return found

    def is_control(self, token_id: int) -> bool:
        """Whether the token steers the model rather than being text; raises UsageError for an unknown id."""
        self._check(token_id)
        return token_id in self._control

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; a control token stands for none unless `special`. Raises UsageError."""
        self._check(token_id)
        kind = self._vocabulary.kinds[token_id]
        if token_id in self._control or kind == TokenKind.USER_DEFINED:
            return b"" if token_id in self._control and not special else self.token_text(token_id).encode()
        if kind == TokenKind.UNUSED:
            return b""
        text = self.token_text(token_id)
        if not self._vocabulary.sentencepiece:
            return b"".join(self._unprintable(char) for char in text)
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text) if kind == TokenKind.BYTE else None:
            return bytes.fromhex(byte[1])
        return text.replace(SPACE, " ").encode()

    def _unprintable(self, char: str) -> bytes:
        byte = self._byte_of.get(char)
        return char.encode() if byte is None else bytes((byte,))

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises UsageError for an unknown id."""
        return b"".join(self.token_bytes(token_id, special=special) for token_id in ids).decode("utf-8", "replace")

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocabulary.size:
            raise UsageError(f"token id {token_id} is not in the vocabulary of {self._vocabulary.size} tokens")


def _well_formed(text: str) -> str:
    """Lone surrogates have no UTF-8 form; they become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _printable_bytes() -> dict[int, str]:
    """The GPT-2 alphabet: each byte as a printable character, those that are none moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(moved)}
