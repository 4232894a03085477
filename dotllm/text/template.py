"""Chat templates: a conversation becomes the one text that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import exceptions

from dotllm.errors import ModelFileError, TemplateError
from dotllm.text.sandbox import RefusedByTemplate, TemplateSandbox, time_limit

__all__ = ["ChatTemplate", "Message", "parsed_arguments", "template_from_metadata"]

Message = Mapping[str, Any]

_LONGEST_SOURCE = 256 * 1024
_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A Jinja chat template, run in a sandbox. Immutable, and safe to share between threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        seconds: float = 5.0,
        longest: int = 16 * 1024 * 1024,
    ) -> None:
        """Compile `source`; `seconds` and `longest` (characters) bound each rendering. Raises TemplateError."""
        if len(source.encode("utf-8", "replace")) > _LONGEST_SOURCE:
            raise TemplateError(f"the chat template is longer than {_LONGEST_SOURCE} bytes; use a shorter one")
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._seconds = seconds
        self._longest = longest
        try:
            self._template = TemplateSandbox().from_string(source)
        except Exception as error:  # Jinja computes constant parts already here, and they may fail in any way
            raise TemplateError(f"the chat template does not parse: {_describe(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation.

        `enable_thinking` is left undefined for None: the template has its own default. `kwargs` are further variables;
        they cannot replace the ones named here. Raises TemplateError if the template refuses the conversation (with
        the template's own words), fails, or exceeds its limits.
        """
        variables = {**kwargs, **self._tokens, "add_generation_prompt": add_generation_prompt}
        variables["tools"] = [dict(tool) for tool in tools] if tools else None
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        failure: Exception | None = None
        with time_limit(self._seconds):
            for variant in _variants(messages):
                try:
                    return self._run({**variables, "messages": variant})
                except (TypeError, exceptions.UndefinedError) as error:
                    # The first failure tells what is wrong; the later variants are guesses.
                    failure = failure or error
                except RefusedByTemplate as error:
                    raise TemplateError(str(error)) from error
                except TemplateError:
                    raise
                except Exception as error:  # a template can raise whatever Python can
                    raise TemplateError(f"the chat template failed: {_describe(error)}") from error
        raise TemplateError(f"the chat template cannot take these messages: {failure}") from failure

    def _run(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > self._longest:
                raise TemplateError(
                    f"the chat template wrote more than {self._longest} characters; use another template"
                )
            parts.append(part)
        return "".join(parts)


def _variants(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The messages in the shapes that templates differ on, the shape of transformers first.

    Most templates want the arguments of a tool call as a mapping and check whether the content is null; some join
    either of them to a string, and then fail with a TypeError.
    """
    for text_arguments, text_content in ((False, False), (False, True), (True, False), (True, True)):
        yield [_shaped(message, text_arguments, text_content) for message in messages]


def parsed_arguments(message: Message) -> dict[str, Any]:
    """A copy of a message in which arguments of tool calls that are JSON objects as text are mappings."""
    return _shaped(message, text_arguments=False, text_content=False)


def _shaped(message: Message, text_arguments: bool, text_content: bool) -> dict[str, Any]:
    shaped = dict(message)
    if text_content and shaped.get("content") is None:
        shaped["content"] = ""
    calls = shaped.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        shaped["tool_calls"] = [_shaped_call(call, text_arguments) for call in calls]
    return shaped


def _shaped_call(call: Any, text_arguments: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    shaped = dict(call)
    if isinstance(shaped.get("function"), Mapping):
        shaped["function"] = _shaped_call(shaped["function"], text_arguments)
    if "arguments" in shaped:
        shaped["arguments"] = _arguments(shaped["arguments"], text_arguments)
    return shaped


def _arguments(value: Any, as_text: bool) -> Any:
    if as_text:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def _describe(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    return f"{error or type(error).__name__}" + (f" (line {line})" if line is not None else "")


def template_from_metadata(metadata: Mapping[str, Any], *, name: str | None = None) -> str | None:
    """The source of the file's chat template, or of its variant `name`; None if the file has none.

    Without `name` it is the default one, or the only variant of a file without a default. Raises ModelFileError for a
    template that is no text.
    """
    key = _KEY if name is None else f"{_KEY}.{name}"
    if name is None and key not in metadata:
        variants = [variant for variant in metadata if variant.startswith(_KEY + ".")]
        key = variants[0] if len(variants) == 1 else key
    source = metadata.get(key)
    if source is not None and not isinstance(source, str):
        raise ModelFileError(f"{key} must be a string, not {source!r:.60}; the file is damaged")
    return source
