"""Rendering a conversation so that only the template writes special tokens, never the words of a user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dotllm.text.marks import Guard, MarkedText, unused_mark
from dotllm.text.template import ChatTemplate, Message, parsed_arguments
from dotllm.text.tokenizer import SpecialToken

__all__ = ["render_chat"]

# Markup that models write in their own turns; templates take an assistant's text apart at it.
_OWN_MARKUP = frozenset(
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "[THINK]", "[/THINK]")
)

_SPOKEN = ("content", "reasoning_content", "reasoning", "thinking")


def render_chat(
    template: ChatTemplate,
    specials: Iterable[SpecialToken],
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool | None = None,
    **kwargs: Any,
) -> MarkedText:
    """The rendered conversation for `Tokenizer.encode_chat`; `specials` are `Tokenizer.specials`.

    In the words of users, tools and the system, control tokens and the markup of the conversation are plain text. In
    the words of the assistant only control tokens are: its history may hold reasoning tags, which templates look for.
    Raises TemplateError, and UsageError if the messages leave no character to mark with.
    """
    specials = tuple(specials)
    parsed = [parsed_arguments(message) for message in messages]
    mark = unused_mark(parsed, list(tools or ()), kwargs)
    guarded = [special.text for special in specials if _steers(special, template.source)]
    everything = Guard(guarded, mark)
    control = {special.text for special in specials if special.control}
    own_words = Guard([text for text in control if text not in _OWN_MARKUP], mark)
    text = template.render(
        [_guarded(message, own_words, everything) for message in parsed],
        tools=everything.value(list(tools)) if tools else None,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
        **everything.value(kwargs),
    )
    return MarkedText(text, mark)


def _guarded(message: Message, own_words: Guard, everything: Guard) -> dict[str, Any]:
    spoken = _SPOKEN if message.get("role") == "assistant" else ()
    return {key: (own_words if key in spoken else everything).value(value) for key, value in message.items()}


def _steers(special: SpecialToken, source: str) -> bool:
    """Control tokens, and user-defined ones that mark up this conversation.

    Others are ordinary text that got a token of its own (runs of line breaks, HTML tags), as the model was trained.
    """
    text = special.text
    if special.control:
        return True
    return not text.isspace() and (
        text in source or text in _OWN_MARKUP or (text.startswith("<|") and text.endswith("|>"))
    )
