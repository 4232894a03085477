"""What a GGUF file says about its tokens, checked: kinds, special ids, end-of-generation tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from dotllm.errors import ModelFileError, UnsupportedModel
from dotllm.text.pretokenizers import PreTokenizer, pre_tokenizer_for

__all__ = ["END_TEXTS", "TokenKind", "Vocabulary"]

PREFIX = "tokenizer.ggml."

# Texts that end a reply in one family or another, when they are special tokens of the file.
END_TEXTS = frozenset(
    (
        *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>"),
        *("<|call|>", "<end_of_turn>", "<eos>", "</s>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<EOT>"),
        *(
            "<|endofturn|>",
            "<|end_of_turn|>",
            "<end_of_utterance>",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            "[EOT]",
            "[EOS]",
        ),
        *("<|fim_repo|>", "<fim_repo>", "<reponame>", "<fim_pad>", "<|calls|>", "<|flush|>"),
    )
)


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer section of a GGUF file without its texts, which a warm start has no need of.

    Attributes:
        size: number of tokens.
        kinds: one TokenKind value a token.
        sentencepiece: True for scores and U+2581 for a space, False for byte-level BPE.
        rule: how text is cut into words (byte-level BPE only).
        bos, eos: ids, or None if the file names none.
        end_ids: ids that the file itself names as ends of a reply (eos, eot, eom).
        add_bos, add_eos: whether a prompt starts and ends with them.
        add_space_prefix: whether text at the start and after a special token gets a space in front.
    """

    size: int
    kinds: Sequence[int]
    sentencepiece: bool
    rule: PreTokenizer
    bos: int | None
    eos: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read the section; raises ModelFileError if it is malformed, UnsupportedModel if it is of an unknown kind."""
        model = _name(metadata, "model", "")
        if model not in ("gpt2", "llama"):
            raise UnsupportedModel(
                f"tokenizer.ggml.model: {model!r} is not supported (supported: gpt2, llama); use another model file"
            )
        sentencepiece = model == "llama"
        rule = PreTokenizer(()) if sentencepiece else pre_tokenizer_for(_name(metadata, "pre", "default"))
        size = len(_array(metadata, "tokens"))
        kinds = _array(metadata, "token_type") if PREFIX + "token_type" in metadata else [TokenKind.NORMAL] * size
        if len(kinds) != size:
            raise ModelFileError(
                f"tokenizer.ggml.token_type has {len(kinds)} entries for {size} tokens; the file is damaged"
            )
        ids = {name: _token_id(metadata, name, size) for name in ("bos", "eos", "eot", "eom")}
        if sentencepiece:
            ids["bos"] = ids["bos"] if ids["bos"] is not None else min(1, size - 1)
            ids["eos"] = ids["eos"] if ids["eos"] is not None else min(2, size - 1)
        return cls(
            size=size,
            kinds=kinds,
            sentencepiece=sentencepiece,
            rule=rule,
            bos=ids["bos"],
            eos=ids["eos"],
            end_ids=frozenset(i for name, i in ids.items() if i is not None and name != "bos"),
            add_bos=_flag(metadata, "add_bos_token", sentencepiece or rule.add_bos) and ids["bos"] is not None,
            add_eos=_flag(metadata, "add_eos_token", False) and ids["eos"] is not None,
            add_space_prefix=sentencepiece and _flag(metadata, "add_space_prefix", True),
        )


def _array(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = metadata.get(PREFIX + name)
    if value is None or isinstance(value, str) or not hasattr(value, "__len__") or len(value) == 0:
        raise ModelFileError(f"tokenizer.ggml.{name} is missing or empty; the file carries no usable tokenizer")
    return value  # type: ignore[no-any-return]


def _name(metadata: Mapping[str, Any], name: str, default: str) -> str:
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, str):
        raise ModelFileError(f"tokenizer.ggml.{name} must be a string, not {value!r:.60}; the file is damaged")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, int):  # as which booleans count
        raise ModelFileError(f"tokenizer.ggml.{name} must be true or false, not {value!r:.60}; the file is damaged")
    return bool(value)


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"{PREFIX}{name}_token_id")
    if value is None:
        return None
    if type(value) is not int:
        raise ModelFileError(
            f"tokenizer.ggml.{name}_token_id must be a whole number, not {value!r:.60}; the file is damaged"
        )
    # 2**32 - 1 is how writers say "there is none".
    if value in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= value < size:
        raise ModelFileError(
            f"tokenizer.ggml.{name}_token_id is {value}, but there are {size} tokens; the file is damaged"
        )
    return value
