"""How text is cut into words before byte-pair merging: one list of patterns per `tokenizer.ggml.pre` name.

The patterns of a list are applied one after another, each to the pieces that the one before it left.
"""

from __future__ import annotations

from dataclasses import dataclass

from dotllm.errors import UnsupportedModel

__all__ = ["PreTokenizer", "pre_tokenizer_for", "supported_pre_tokenizers"]

# Written out rather than with (?i:...): a case-insensitive group would also take U+017F for "s".
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Split patterns, and the two habits that go with them.

    Attributes:
        patterns: regular expressions (Oniguruma syntax), applied in turn.
        ignore_merges: a word that is a token as a whole is that token, whatever the merges would make of it.
        add_bos: whether a prompt starts with the BOS token if the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_QWEN2_RULE = PreTokenizer((_QWEN2,))
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_GPT2_RULE = PreTokenizer((_GPT2,))
_SINGLE_DIGITS_RULE = PreTokenizer((r"\p{N}", _GPT2))
_DEFAULT_RULE = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_RULES = {
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "qwen35": PreTokenizer((_QWEN35,)),
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "smollm": _SINGLE_DIGITS_RULE,
    "starcoder": _SINGLE_DIGITS_RULE,
    "default": _DEFAULT_RULE,
}


def supported_pre_tokenizers() -> tuple[str, ...]:
    """Names of `tokenizer.ggml.pre` that are understood, in alphabetical order."""
    return tuple(sorted(_RULES))


def pre_tokenizer_for(name: str) -> PreTokenizer:
    """The rule of a `tokenizer.ggml.pre` name; raises UnsupportedModel for an unknown one."""
    try:
        return _RULES[name]
    except KeyError:
        supported = ", ".join(supported_pre_tokenizers())
        raise UnsupportedModel(
            f"tokenizer.ggml.pre: pre-tokenizer {name!r} is not supported (supported: {supported}); "
            "use a model of a supported family"
        ) from None
