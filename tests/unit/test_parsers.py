"""Reasoning and content come apart the same way however the reply is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dotllm.errors import UsageError
from dotllm.text.parsers import Part, ReasoningSplitter


def split(pieces: list[str], starts_inside: bool = False) -> tuple[str, str, list[Part]]:
    splitter = ReasoningSplitter(starts_inside=starts_inside)
    parts = [part for piece in pieces for part in splitter.push(piece)]
    parts += splitter.finish()
    reasoning, content = (
        "".join(text for kind, text in parts if kind == wanted) for wanted in ("reasoning", "content")
    )
    return reasoning, content, parts


@pytest.mark.parametrize(
    ("reply", "starts_inside", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", False, "why", "because"),
        ("why\n</think>\n\nbecause", True, "why", "because"),
        ("\n\n</think>\n\nbecause", True, "", "because"),
        ("<think>\n\n</think>\n\nbecause", False, "", "because"),
        ("plain", False, "", "plain"),
        ("  plain", False, "", "  plain"),
        ("about <think> tags </think>.", False, "", "about <think> tags </think>."),
        ("<think>a</think>b <think>c</think>", False, "a", "b <think>c</think>"),
        ("<think>never ends", False, "never ends", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("<thi", False, "", "<thi"),
        ("  ", False, "", "  "),
        ("a < b </think>c", True, "a < b ", "c"),
        ("one\n\ntwo</think>", True, "one\n\ntwo", ""),
    ],
)
def test_whole_and_by_character(reply: str, starts_inside: bool, reasoning: str, content: str) -> None:
    assert split([reply], starts_inside)[:2] == (reasoning, content)
    assert split(list(reply), starts_inside)[:2] == (reasoning, content)


TAGS = st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "</th", ">"]), max_size=10)


@settings(max_examples=300, deadline=None)
@given(parts=TAGS, places=st.lists(st.integers(0, 80), max_size=10), starts_inside=st.booleans())
def test_pieces_do_not_matter(parts: list[str], places: list[int], starts_inside: bool) -> None:
    reply = "".join(parts)
    edges = sorted({0, len(reply), *(place % (len(reply) + 1) for place in places)})
    pieces = [reply[a:b] for a, b in pairwise(edges)]
    whole, cut = split([reply], starts_inside), split(pieces, starts_inside)
    assert whole[:2] == cut[:2]
    assert all(text for _, text in cut[2])


def test_text_is_not_held_longer_than_needed() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>abc") == [("reasoning", "abc")]
    assert splitter.push("</thin") == []
    assert splitter.push("g") == [("reasoning", "</thing")]
    assert splitter.push("</think>x") == [("content", "x")]


def test_empty_tags_are_refused() -> None:
    with pytest.raises(UsageError):
        ReasoningSplitter(open="")
