"""Whatever is drafted, the answer is that of plain decoding: tokens, text, log probabilities, count and reason."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from letters import Letters

from dotllm.errors import DotLLMError, StateError
from dotllm.sampling.params import SamplingParams
from dotllm.spec.verify import Cursor, Emitted, verify
from dotllm.text.stream import TextStream

VOCABULARY = 30
PROMPT = (4, 11, 12, 4)
END = 3


def logits_after(history: Sequence[int]) -> np.ndarray:
    """A language model: any function of the history."""
    return _row(len(history), tuple(history[-2:]))


@functools.cache
def _row(length: int, last: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([length, *last])
    row = rng.standard_normal(VOCABULARY).astype(np.float32) * 2
    row[END] -= 20.0
    return row


def make(sampling: SamplingParams, *, max_tokens: int, context: int = 1000, ends=(END,), stops=()) -> Cursor:
    return Cursor(sampling, PROMPT, TextStream(Letters(), stops), end_ids=ends, max_tokens=max_tokens, context=context)


def plain(cursor: Cursor) -> list[Emitted]:
    """The loop without drafts, written out."""
    out = []
    while cursor.finish is None:
        out.append(cursor.take(logits_after(cursor.history)))
    return out


def blocks(cursor: Cursor, propose: Callable[[int], Sequence[int]]) -> list[Emitted]:
    """The loop with drafts; `propose(n)` drafts after n tokens of the answer."""
    out: list[Emitted] = []
    while cursor.finish is None:
        drafts = list(propose(len(out)))
        history = list(cursor.history)
        rows = np.stack([logits_after(history + drafts[:i]) for i in range(len(drafts) + 1)])
        cursor.begin()
        verdict = verify(cursor, drafts, rows)
        cursor.commit(verdict.rows)
        assert cursor.history == history + [e.token for e in verdict.tokens]
        assert verdict.rows == verdict.accepted + 1
        assert verdict.tokens[: verdict.accepted] == tuple(
            e for e, d in zip(verdict.tokens[: verdict.accepted], drafts, strict=False) if e.token == d
        )
        out += verdict.tokens
    return out


PENALTIES = {
    "greedy": SamplingParams(seed=1, top_logprobs=2),
    "repeat": SamplingParams(seed=1, repeat_penalty=1.8, repeat_last_n=8),
    "presence": SamplingParams(seed=1, presence_penalty=1.5, repeat_last_n=-1),
    "frequency": SamplingParams(seed=1, frequency_penalty=0.9),
    "sampled": SamplingParams(seed=1, temperature=0.9, top_k=12, repeat_penalty=1.2, top_logprobs=3),
}


def wrong(token: int) -> int:
    return 10 + (token - 10 + 1) % 20


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_drafts_right_and_wrong_at_each_place(name: str, depth: int) -> None:
    expected_cursor = make(PENALTIES[name], max_tokens=40)
    expected = plain(expected_cursor)
    answer = [e.token for e in expected]
    for bad in [None, *range(depth)]:

        def propose(n: int, bad: int | None = bad) -> list[int]:
            drafts = answer[n : n + depth]
            if bad is not None and bad < len(drafts):
                drafts[bad] = wrong(drafts[bad])
            return drafts

        cursor = make(PENALTIES[name], max_tokens=40)
        assert blocks(cursor, propose) == expected
        assert cursor.finish == expected_cursor.finish == "length"
        assert cursor.digest() == expected_cursor.digest()


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_an_end_token_at_every_place_of_the_block(name: str) -> None:
    answer = [e.token for e in plain(make(PENALTIES[name], max_tokens=24))]
    for length in range(1, 13):
        end = answer[length - 1]
        if end in answer[: length - 1]:
            continue
        expected = plain(make(PENALTIES[name], max_tokens=24, ends=(end,)))
        assert len(expected) == length
        for depth in range(9):
            cursor = make(PENALTIES[name], max_tokens=24, ends=(end,))
            assert blocks(cursor, lambda n, d=depth: answer[n : n + d]) == expected
            assert (cursor.finish, cursor.generated) == ("stop", length)


def test_a_stop_string_at_every_place_of_the_block() -> None:
    answer = [e.token for e in plain(make(PENALTIES["greedy"], max_tokens=24))]
    text = "".join(e.text for e in plain(make(PENALTIES["greedy"], max_tokens=24)))
    checked = 0
    for size in (1, 2, 3):
        for start in range(len(text) - size):
            stop = text[start : start + size]
            expected = plain(make(PENALTIES["greedy"], max_tokens=24, stops=(stop,)))
            assert "".join(e.text for e in expected) == text[: text.index(stop)]
            for depth in (1, 2, 3, 5, 8):
                cursor = make(PENALTIES["greedy"], max_tokens=24, stops=(stop,))
                assert blocks(cursor, lambda n, d=depth: answer[n : n + d]) == expected
                assert cursor.finish == "stop"
                assert cursor.text.stop_string == stop
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_max_tokens_and_context_end_give_exactly_that_many(depth: int) -> None:
    answer = [e.token for e in plain(make(PENALTIES["greedy"], max_tokens=24))]
    for limit in range(1, depth + 4):
        for cursor in (
            make(PENALTIES["greedy"], max_tokens=limit),
            make(PENALTIES["greedy"], max_tokens=1000, context=len(PROMPT) + limit),
        ):
            assert cursor.room == limit
            out = blocks(cursor, lambda n: answer[n : n + depth])
            assert [e.token for e in out] == answer[:limit]
            assert (cursor.finish, cursor.generated, cursor.room) == ("length", limit, 0)


def test_stop_string_before_the_limit_wins_also_on_the_very_last_token() -> None:
    whole = plain(make(PENALTIES["greedy"], max_tokens=10))
    answer, text = [e.token for e in whole], "".join(e.text for e in whole)
    for stop in (text[-2:], text[3:5]):
        cursor = make(PENALTIES["greedy"], max_tokens=10, stops=(stop,))
        out = blocks(cursor, lambda n: answer[n : n + 8])
        assert cursor.finish == "stop"
        assert "".join(e.text for e in out) == text[: text.index(stop)]


def test_an_end_token_on_the_last_permitted_place_is_a_stop() -> None:
    answer = [e.token for e in plain(make(PENALTIES["sampled"], max_tokens=24))]
    length = next(i for i in range(4, 24) if answer[i] not in answer[:i]) + 1
    cursor = make(PENALTIES["sampled"], max_tokens=length, ends=(answer[length - 1],))
    blocks(cursor, lambda n: answer[n : n + 3])
    assert (cursor.finish, cursor.generated) == ("stop", length)


def test_held_back_text_comes_out_at_the_limit() -> None:
    text = "".join(e.text for e in plain(make(PENALTIES["greedy"], max_tokens=6)))
    cursor = make(PENALTIES["greedy"], max_tokens=6, stops=(text[-1] + "never",))
    out = plain(cursor)
    assert "".join(e.text for e in out) == text
    assert cursor.finish == "length"


def test_random_drafts_of_random_depth() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        sampling = SamplingParams(seed=seed, temperature=rng.choice([0.0, 0.8]), repeat_penalty=rng.choice([1.0, 1.4]))
        expected = plain(make(sampling, max_tokens=30))
        answer = [e.token for e in expected]

        def propose(n: int, rng: random.Random = rng, answer: list[int] = answer) -> list[int]:
            drafts = answer[n : n + rng.randrange(8)]
            return [d if rng.random() < 0.8 else rng.randrange(VOCABULARY) for d in drafts]

        assert blocks(make(sampling, max_tokens=30), propose) == expected


def test_abort_goes_back_to_begin_even_after_commit() -> None:
    cursor = make(PENALTIES["sampled"], max_tokens=8, stops=("zz",))
    cursor.take(logits_after(cursor.history))
    before, text = cursor.digest(), cursor.text.mark()
    for committed in (False, True):
        cursor.begin()
        answer = [cursor.take(logits_after(cursor.history)) for _ in range(7)]
        assert cursor.finish == "length"
        if committed:
            cursor.commit(7)
        cursor.abort()
        assert (cursor.digest(), cursor.text.mark(), cursor.finish) == (before, text, None)
    assert [cursor.take(logits_after(cursor.history)) for _ in range(7)] == answer


def test_a_failing_row_leaves_nothing_after_abort() -> None:
    cursor = make(PENALTIES["greedy"], max_tokens=8)
    before = cursor.digest()
    rows = np.stack([logits_after(cursor.history), np.full(VOCABULARY, np.nan, np.float32)])
    cursor.begin()
    with pytest.raises(DotLLMError, match="finite"):
        verify(cursor, [int(rows[0].argmax())], rows)
    cursor.abort()
    assert cursor.digest() == before


def test_snapshot_and_restore_go_on_with_the_same_words() -> None:
    cursor = make(PENALTIES["sampled"], max_tokens=12)
    for _ in range(5):
        cursor.take(logits_after(cursor.history))
    saved = cursor.snapshot()
    rest = plain(cursor)
    other = make(PENALTIES["sampled"], max_tokens=12)
    other.restore(saved)
    assert plain(other) == rest
    with pytest.raises(StateError, match="same prompt"):
        Cursor(SamplingParams(), (1, 2), TextStream(Letters()), end_ids=(), max_tokens=3, context=9).restore(saved)


def test_misuse_is_refused() -> None:
    cursor = make(PENALTIES["greedy"], max_tokens=1)
    with pytest.raises(StateError, match="2 rows of logits"):
        verify(cursor, [5], logits_after(PROMPT)[None])
    cursor.take(logits_after(PROMPT))
    with pytest.raises(StateError, match="ended"):
        cursor.take(logits_after(PROMPT))


def test_characters_of_several_tokens_inside_a_block_come_out_whole() -> None:
    """Token 10 + b is byte b of the text; every block border is tried."""
    text = "naïve नमस्ते 👩‍🚀 мир"
    data = text.encode()

    class Bytes:
        def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
            return bytes([token_id - 10])

    def row(place: int) -> np.ndarray:
        logits = np.zeros(266, np.float32)
        logits[10 + data[place % len(data)]] = 1.0
        return logits

    for count in (len(data), len(data) - 1):  # the second ends within a character
        for depth in range(8):
            stream = TextStream(Bytes(), ("never",))
            cursor = Cursor(SamplingParams(), [1], stream, end_ids=(), max_tokens=count, context=1000)
            out: list[Emitted] = []
            while cursor.finish is None:
                place = len(out)
                drafts = [10 + b for b in data[place : place + depth]]
                out += verify(cursor, drafts, np.stack([row(place + i) for i in range(len(drafts) + 1)])).tokens
            assert "".join(e.text for e in out) == data[:count].decode(errors="replace")
            assert not any("\ufffd" in e.text for e in out[:-1])
