"""Small vocabularies for test files: byte-level BPE as Qwen has it, and SentencePiece pieces as Gemma has them."""

from __future__ import annotations

from typing import Any

from gguf import GGUFWriter

__all__ = ["add_byte_pairs", "add_pieces"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MERGES = [
    "t h",
    "th e",
    "Ġ t",
    "Ġ a",
    "i n",
    "e r",
    "Ġ the",
    "o n",
    "r e",
    "a t",
    "e n",
    "Ġ w",
    "Ġ s",
    "o u",
    "in g",
    "Ġ o",
    "Ġ b",
    "e d",
    "Ġ c",
    "i s",
    "Ġ f",
    "e s",
    "o r",
    "Ġa n",
    "Ġan d",
    "a n",
    "l l",
    "Ġ p",
    "Ġ i",
    "Ġo f",
]
PIECES = [
    "th",
    "in",
    "er",
    "on",
    "an",
    "at",
    "en",
    "ou",
    "is",
    "or",
    "▁t",
    "▁a",
    "▁w",
    "▁s",
    "▁th",
    "the",
    "ing",
    "▁the",
    "▁an",
    "and",
    "▁and",
    "▁o",
    "▁of",
]
SPECIALS = {
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
    "<tool_call>": USER_DEFINED,
    "</tool_call>": USER_DEFINED,
}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\\n' + m['content'] + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def add_byte_pairs(writer: GGUFWriter, size: int, pre: str) -> int:
    """Write a vocabulary of 256 bytes, 30 merges and 7 special tokens, filled up to `size`; returns its size."""
    tokens = byte_characters() + [merge.replace(" ", "") for merge in MERGES]
    types = [NORMAL] * len(tokens) + list(SPECIALS.values())
    tokens += SPECIALS
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    _add_tokens(writer, tokens, types, size)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    return len(tokens)


def add_pieces(writer: GGUFWriter, size: int) -> int:
    """Write a SentencePiece vocabulary with scores and byte fallback, filled up to `size`; returns its size."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, CONTROL]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    single = ["▁", *"abcdefghijklmnopqrstuvwxyz", *".,!?'\n"]
    tokens += PIECES + single
    types += [NORMAL] * (len(PIECES) + len(single))
    scores = [0.0] * (len(tokens) - len(PIECES) - len(single)) + [-float(i) for i in range(len(PIECES) + len(single))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    _add_tokens(writer, tokens, types, size)
    writer.add_token_scores(scores + [-1000.0] * (len(tokens) - len(scores)))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_eot_token_id(5)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TURNS)
    return len(tokens)


def _add_tokens(writer: GGUFWriter, tokens: list[Any], types: list[int], size: int) -> None:
    """Fill both lists up to `size` with unused tokens and write them."""
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    types += [UNUSED] * (len(tokens) - len(types))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
