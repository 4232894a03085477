"""The story tokenizer: byte-level BPE of 4096 tokens behind the `qwen35` pre-tokenizer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["END", "SPECIALS", "VOCAB", "encode", "train"]

VOCAB = 4096
END = "<|endoftext|>"
SPECIALS = (END, "<|im_start|>", "<|im_end|>")
"""They take the last ids, as in the Qwen vocabularies."""

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What `tokenizer.ggml.pre = "qwen35"` means: the qwen2 expression, with combining marks counted as letters."""


def train(documents: list[str]) -> Tokenizer:
    """A tokenizer of exactly VOCAB tokens learnt from the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIALS),
        special_tokens=[],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    if tokenizer.get_vocab_size() != VOCAB:
        size = tokenizer.get_vocab_size()
        raise SystemExit(f"the texts give only {size} tokens of {VOCAB}; add more text (a megabyte is enough)")
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.uint16]:
    """All documents as one stream of ids, each followed by END."""
    end = tokenizer.token_to_id(END)
    parts = [np.array([*e.ids, end], np.uint16) for e in tokenizer.encode_batch(documents)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)
