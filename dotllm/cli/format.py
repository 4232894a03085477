"""From a conversation to the tokens that the model continues: by a chat template, or as plain text without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dotllm.cli.prompt import read_text

if TYPE_CHECKING:
    from dotllm.cli.conversation import Conversation
    from dotllm.gguf.reader import GGUFFile
    from dotllm.text.template import ChatTemplate
    from dotllm.text.tokenizer import Tokenizer

__all__ = ["ChatFormat", "ChatPrompt", "common_prefix", "plain_prompt", "template_format"]

_STYLES = {
    "<|im_start|>": "ChatML",
    "<start_of_turn>": "Gemma",
    "<|start_header_id|>": "Llama 3",
    "[INST]": "Mistral",
}
_OPEN = "<think>"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Tokens of a conversation up to where the reply begins; `stable` of them also begin the next turn's prompt.

    `inside_reasoning`: the template has opened the reasoning already.
    """

    tokens: tuple[int, ...]
    stable: int
    inside_reasoning: bool


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A chat template and the tokenizer for what it renders; `note` says where it is from."""

    template: ChatTemplate
    tokenizer: Tokenizer
    note: str

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> ChatPrompt:
        """Raises TemplateError if the template refuses the messages.

        The next turn repeats everything but the words with which the template opens a reply, because templates drop
        or rewrite earlier reasoning.
        """
        from dotllm.text.chat import render_chat

        specials = self.tokenizer.specials
        whole = render_chat(self.template, specials, messages, add_generation_prompt=True)
        before = render_chat(self.template, specials, messages, add_generation_prompt=False)
        tokens = tuple(self.tokenizer.encode_chat(whole))
        stable = common_prefix(tokens, self.tokenizer.encode_chat(before))
        return ChatPrompt(tokens, stable, whole.plain.rstrip().endswith(_OPEN))


def template_format(file: GGUFFile, tokenizer: Tokenizer, path: Path | None) -> ChatFormat | None:
    """The template in `path`, else the file's own, else None. Raises TemplateError if it does not parse."""
    from dotllm.text.template import ChatTemplate, template_from_metadata

    source = template_from_metadata(file.metadata) if path is None else read_text(path)
    if source is None:
        return None
    bos, eos = ("" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos, tokenizer.eos))
    style = next((style for mark, style in _STYLES.items() if mark in source), "unnamed style")
    where = "the file's own" if path is None else str(path)
    return ChatFormat(ChatTemplate(source, bos_token=bos, eos_token=eos), tokenizer, f"{where} ({style})")


def plain_prompt(conversation: Conversation, tokenizer: Tokenizer) -> ChatPrompt:
    """All that was said, one after the other, for a model without a template: it goes on from the last words."""
    tokens, said = tokenizer.encode("", add_special=True), ""
    for turn in conversation.turns:
        gap = " " if said and not said[-1].isspace() else ""
        for said in (gap + turn.user, turn.reply):
            tokens += tokenizer.encode(said, parse_special=False)
    return ChatPrompt(tuple(tokens), len(tokens), inside_reasoning=False)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
