"""Streams release whole characters, never a part of a stop string, and can be taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dotllm.errors import UsageError
from dotllm.text.stream import TextStream


class Bytes:
    """A tokenizer whose tokens are the given byte strings."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        return self._tokens[token_id]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def run(tokens: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(tokens), stop)
    parts = [stream.push(i) for i in range(len(tokens))]
    return [*parts, stream.finish()], stream


PLACES = st.lists(st.integers(0, 200), max_size=30)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aé你😀नि\u200d\n"), max_size=20), places=PLACES)
def test_joined_parts_are_the_text_whatever_the_tokens(text: str, places: list[int]) -> None:
    parts, _ = run(cut(text.encode(), places), [])
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=12), places=PLACES)
def test_bytes_that_are_no_text_come_out_as_in_one_piece(data: bytes, places: list[int]) -> None:
    parts, _ = run(cut(data, places), [])
    assert "".join(parts) == data.decode("utf-8", "replace")


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            word = max(found, key=len)
            return text[: end - len(word)], word
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(st.sampled_from("ab\n"), max_size=20),
    stop=st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=4), max_size=3, unique=True),
    places=PLACES,
)
def test_a_stop_string_ends_the_text_and_never_shows(text: str, stop: list[str], places: list[int]) -> None:
    parts, stream = run(cut(text.encode(), places), stop)
    expected, word = reference(text, stop)
    assert "".join(parts) == expected
    assert stream.stop_string == word
    assert stream.stopped == (word is not None)
    for count in range(len(parts)):
        assert expected.startswith("".join(parts[:count]))


def test_a_stop_string_over_three_tokens() -> None:
    parts, stream = run([b"hello <", b"|im", b"_end|> more", b" text"], ["<|im_end|>"])
    assert parts == ["hello ", "", "", "", ""]
    assert stream.stop_string == "<|im_end|>"


def test_text_held_back_for_a_stop_string_comes_when_it_was_none() -> None:
    parts, _ = run([b"a<", b"|b"], ["<|im_end|>"])
    assert parts == ["a", "<|b", ""]


def test_a_character_over_several_tokens_comes_whole() -> None:
    parts, _ = run([b"\xf0", b"\x9f\x98", b"\x80!"], [])
    assert parts == ["", "", "\U0001f600!", ""]


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    parts, _ = run([b"a\xf0\x9f\x98"], [])
    assert parts == ["a", "\ufffd"]


@settings(max_examples=200, deadline=None)
@given(
    kept=st.lists(st.sampled_from([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xf0\x9f"]), max_size=6),
    undone=st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9"]), max_size=6),
    later=st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9"]), max_size=6),
)
def test_restore_is_as_if_nothing_had_been_pushed(kept: list[bytes], undone: list[bytes], later: list[bytes]) -> None:
    tokens = kept + undone + later
    tried, plain = (TextStream(Bytes(tokens), ["aab", "é"]) for _ in range(2))
    for i in range(len(kept)):
        assert tried.push(i) == plain.push(i)
    mark = tried.mark()
    for i in range(len(kept), len(kept) + len(undone)):
        tried.push(i)
    tried.restore(mark)
    for i in range(len(kept) + len(undone), len(tokens)):
        assert tried.push(i) == plain.push(i)
    assert tried.stop_string == plain.stop_string
    assert tried.finish() == plain.finish()


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        TextStream(Bytes([]), [""])
