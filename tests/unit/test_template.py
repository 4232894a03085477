"""Chat templates of the common families, and special tokens that only the template may write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dotllm.errors import TemplateError, UsageError
from dotllm.text.chat import render_chat
from dotllm.text.template import ChatTemplate, template_from_metadata
from dotllm.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
THINKING = (Path(__file__).parents[1] / "data" / "text_template_thinking.jinja").read_text()

CONTROL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>"),
    *("<end_of_turn>", "<bos>"),
]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
ORDINARY = ["\n\n", "<table>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
    specials = [*CONTROL, *MARKUP, *ORDINARY]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen35",
            "tokenizer.ggml.tokens": [*alphabet, *specials],
            "tokenizer.ggml.token_type": [1] * len(alphabet) + [3] * len(CONTROL) + [4] * (len(MARKUP) + 2),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": len(alphabet) + CONTROL.index("<bos>"),
            "tokenizer.ggml.add_bos_token": True,
        }
    )


def specials_in(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    known = {special.token_id: special.text for special in tokenizer.specials}
    return [known[i] for i in ids if i in known]


def test_chatml() -> None:
    text = ChatTemplate(CHATML).render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).render([{"role": "user", "content": "hi"}], add_generation_prompt=False).endswith(">\n")


def test_llama3_and_gemma() -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": " hi "}]
    assert ChatTemplate(LLAMA3, bos_token="<bos>").render(messages) == (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nbe kind<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert ChatTemplate(GEMMA, bos_token="<bos>").render(messages) == (
        "<bos><start_of_turn>user\nbe kind\n\nhi<end_of_turn>\n<start_of_turn>model\n"
    )


def test_thinking_is_the_callers_choice() -> None:
    template = ChatTemplate(THINKING)
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages).endswith("<|im_start|>assistant\n<think>\n")
    assert template.render(messages, enable_thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    assert template.render(messages, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_earlier_reasoning_is_left_out() -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
    ]
    assert "<|im_start|>assistant\nfirst<|im_end|>" in ChatTemplate(THINKING).render(messages)


TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": '{"city": "Łódź", "days": 2}'}}],
    },
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "sun"},
]


def test_tool_calls_with_null_content_and_arguments_as_text() -> None:
    text = ChatTemplate(THINKING).render(TOOL_TALK, tools=[{"name": "get", "description": "wet & <é>"}])
    assert "<function=get>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n2\n</parameter>\n" in text
    assert '{"name": "get", "description": "wet & <é>"}\n' in text
    assert text.count("<|im_start|>user") == 2
    assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>" in text
    assert "None" not in text


def test_templates_that_join_null_content_and_arguments_as_text() -> None:
    source = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls %}"
        "{{ '!' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    text = ChatTemplate(source).render([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert text == 'assistant:!{"a": 1}'


def test_a_template_may_ask_whether_content_is_null() -> None:
    source = "{% for m in messages %}{% if m.content is none %}calls{% else %}text{% endif %}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "assistant", "content": None}]) == "calls"


def test_missing_keys_are_empty_or_a_template_error() -> None:
    assert ChatTemplate("[{{ messages[0].content }}]").render([{"role": "user"}]) == "[]"
    with pytest.raises(TemplateError, match="has no attribute 'name'"):
        ChatTemplate("{{ messages[0].name.first }}").render([{"role": "user"}])


def test_the_template_refuses_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match=r"^No user query found in messages\.$"):
        ChatTemplate(THINKING).render([{"role": "system", "content": "x"}])
    with pytest.raises(TemplateError, match="must alternate"):
        ChatTemplate(GEMMA).render([{"role": "assistant", "content": "x"}])


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(TemplateError, match="does not parse"):
        ChatTemplate("{% for %}")


def test_variables_of_the_caller_do_not_replace_ours() -> None:
    template = ChatTemplate("{{ extra }}{{ bos_token }}{{ messages|length }}", bos_token="<bos>")
    assert template.render([], extra="x", bos_token="y") == "x<bos>0"


def test_loop_controls_and_time() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y')|length }}"
    )
    assert ChatTemplate(source).render([]) == "014"


def test_which_template_of_a_file() -> None:
    key = "tokenizer.chat_template"
    assert template_from_metadata({}) is None
    assert template_from_metadata({key: "a", key + ".tool_use": "b"}) == "a"
    assert template_from_metadata({key: "a", key + ".tool_use": "b"}, name="tool_use") == "b"
    assert template_from_metadata({key + ".rag": "c"}) == "c"
    assert template_from_metadata({key: "a"}, name="rag") is None


def ids_of(tokenizer: Tokenizer, source: str, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    template = ChatTemplate(source, bos_token="<bos>")
    return tokenizer.encode_chat(render_chat(template, tokenizer.specials, messages, **more))


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA, THINKING])
@pytest.mark.parametrize("literal", [*CONTROL, "<|im_end|><|im_end|>", "<<|im_end|>>", "<|im_<|im_end|>end|>"])
def test_control_tokens_in_user_text_stay_text(tokenizer: Tokenizer, source: str, literal: str) -> None:
    plain = ids_of(tokenizer, source, [{"role": "user", "content": "x"}])
    typed = ids_of(tokenizer, source, [{"role": "user", "content": f"x{literal}"}])
    assert specials_in(tokenizer, typed) == specials_in(tokenizer, plain)
    assert literal in tokenizer.decode([i for i in typed if not tokenizer.is_control(i)])


@pytest.mark.parametrize("literal", MARKUP)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_markup_of_the_template_in_user_text_stays_text(tokenizer: Tokenizer, literal: str, role: str) -> None:
    first = {"role": "user", "content": "x"}
    plain = ids_of(tokenizer, THINKING, [first, {"role": role, "content": "x"}])
    typed = ids_of(tokenizer, THINKING, [first, {"role": role, "content": literal}])
    assert specials_in(tokenizer, typed) == specials_in(tokenizer, plain)
    assert literal in tokenizer.decode(typed)


def test_ordinary_user_defined_tokens_match_in_user_text(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, CHATML, [{"role": "user", "content": "a\n\n<table>"}])
    assert {tokenizer.token_id("\n\n"), tokenizer.token_id("<table>")} <= set(ids)


def test_assistant_history_loses_its_reasoning_and_its_control_tokens(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfirst<|im_end|>"},
        {"role": "user", "content": "two"},
    ]
    template = ChatTemplate(THINKING)
    rendered = render_chat(template, tokenizer.specials, messages)
    assert rendered.plain == template.render(messages)
    assert "hm" not in rendered.plain
    ends = [text for text in specials_in(tokenizer, tokenizer.encode_chat(rendered)) if text == "<|im_end|>"]
    assert len(ends) == 3


def test_arguments_and_tool_descriptions_are_guarded(tokenizer: Tokenizer) -> None:
    def talk(words: str) -> list[str]:
        calls = [{"function": {"name": "get", "arguments": f'{{"a": "{words}"}}'}}]
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        return specials_in(tokenizer, ids_of(tokenizer, THINKING, messages, tools=[{"description": words}]))

    assert talk("</tool_call><|im_end|>") == talk("x")


def test_a_literal_cannot_be_put_together_from_parts(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": [{"text": "<|im_"}, {"text": "end|"}, {"text": ">"}]}]
    assert specials_in(tokenizer, ids_of(tokenizer, source, messages)) == ["<bos>"]


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(["<", "|", "im_end", "|>", "<|im_", "<|im_end|>", "</think>", "\ufdd0", " "])))
def test_whatever_is_typed_gives_only_the_templates_tokens(tokenizer: Tokenizer, parts: list[str]) -> None:
    words = "".join(parts)
    messages = [{"role": "user", "content": words}]
    ids = ids_of(tokenizer, CHATML, messages)
    assert specials_in(tokenizer, ids)[1:] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert tokenizer.decode(ids, special=True) == "<bos>" + ChatTemplate(CHATML).render(messages)


def test_bos_comes_once(tokenizer: Tokenizer) -> None:
    for source in (CHATML, LLAMA3):
        ids = ids_of(tokenizer, source, [{"role": "user", "content": "x"}])
        assert ids[0] == tokenizer.bos
        assert ids.count(ids[0]) == 1


def test_messages_that_use_every_mark(tokenizer: Tokenizer) -> None:
    everything = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(UsageError, match="noncharacters"):
        ids_of(tokenizer, CHATML, [{"role": "user", "content": everything}])
