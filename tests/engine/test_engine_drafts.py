"""Drafts of any kind change neither words nor state, on recurrent models too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engines import CONTEXT, Lab, answer, events_of, prompt_of, run_all

from dotllm.engine.engine import Engine
from dotllm.engine.request import Request
from dotllm.sampling.params import SamplingParams
from dotllm.spec.verify import Cursor

SAMPLINGS = [
    SamplingParams(top_logprobs=2),
    SamplingParams(repeat_penalty=1.5, frequency_penalty=0.4, top_logprobs=1),
    SamplingParams(temperature=0.9, top_k=20, seed=3, presence_penalty=0.5, top_logprobs=1),
]


class Oracle:
    """Knows every answer, and drafts what `spoil` makes of the next tokens of it."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], spoil: Callable[[list[int]], list[int]]) -> None:
        self.answers, self.spoil, self.asked = answers, spoil, 0

    def depth(self, cursor: Cursor) -> int:
        return 8

    def propose(self, step: Any, cursors: Sequence[Cursor], depths: Sequence[int]) -> list[list[int]]:
        out = []
        for cursor, depth in zip(cursors, depths, strict=True):
            known = self.answers[tuple(cursor.history[: cursor.prompt_tokens])]
            out.append(self.spoil(known[cursor.generated : cursor.generated + depth])[:depth])
            self.asked += depth
        return out


def wrong_at(place: int) -> Callable[[list[int]], list[int]]:
    return lambda drafts: [t if i != place else (t + 1) % 300 for i, t in enumerate(drafts)]


def shaky(seed: int) -> Callable[[list[int]], list[int]]:
    rng = random.Random(seed)
    return lambda drafts: [
        t if rng.random() < 0.7 else rng.randrange(300) for t in drafts[: rng.randrange(1 + len(drafts))]
    ]


@pytest.fixture(params=["hybrid", "dense"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def digests_by_length(engine: Engine, number: int) -> dict[int, bytes]:
    """The state after each step of a request, by its length."""
    seen = {}
    while engine.has_work:
        engine.step()
        for active in engine._scheduler.running:
            if active.id == number:
                seen[active.sequence.length] = engine.state.digest(active.sequence)
    return seen


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalties", "sampled"])
def test_right_and_wrong_drafts_give_the_same_events_and_the_same_state(lab: Lab, sampling: SamplingParams) -> None:
    request = Request(prompt_of(1, 21), sampling, max_tokens=20)
    plain = lab.engine(sequences=1)
    expected_digests = digests_by_length(plain, plain.submit(request))
    expected = list(lab.engine(sequences=1).generate(request))
    oracle = {request.prompt: answer(expected)}
    for place in (0, 1, 4, 99):
        engine = lab.engine(sequences=1, drafter=Oracle(oracle, wrong_at(place)))
        events = list(engine.generate(request))
        assert [(e.token, e.text, e.logprob, e.top) for e in events] == [
            (e.token, e.text, e.logprob, e.top) for e in expected
        ]
        assert events[-1].finish_reason == expected[-1].finish_reason
        assert engine.stats.steps <= 21 - min(place, 8) * 2
        engine = lab.engine(sequences=1, drafter=Oracle(oracle, wrong_at(place)))
        digests = digests_by_length(engine, engine.submit(request))
        assert digests.items() <= expected_digests.items()
        assert len(digests) >= 3


def test_drafts_of_changing_depth_beside_prompts_and_other_answers(lab: Lab) -> None:
    requests = [
        Request(prompt_of(50 + i, 5 + 9 * i), SAMPLINGS[i % 3], max_tokens=12 + i, stop=("¢",)) for i in range(7)
    ]
    expected = [list(lab.engine(sequences=1).generate(request)) for request in requests]
    oracle = {r.prompt: answer(e) for r, e in zip(requests, expected, strict=True)}
    for seed in range(2):
        engine = lab.engine(sequences=4, chunk=13, drafter=Oracle(oracle, shaky(seed)))
        numbers = [engine.submit(request) for request in requests]
        events = run_all(engine)
        assert engine.state.used_pages == 0
        assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
        for number, wanted in zip(numbers, expected, strict=True):
            got = events_of(events, number)
            assert [(e.token, e.text, e.logprob, e.finish_reason) for e in got] == [
                (e.token, e.text, e.logprob, e.finish_reason) for e in wanted
            ]


def test_one_token_asks_for_no_drafts_and_the_context_end_is_exact(lab: Lab) -> None:
    prompt = prompt_of(2, 9)
    known = lab.greedy(prompt, 12)
    for limit in range(1, 11):
        drafter = Oracle({prompt: known}, lambda drafts: drafts)
        engine = lab.engine(drafter=drafter)
        events = list(engine.generate(Request(prompt, max_tokens=limit)))
        assert answer(events) == known[:limit]
        assert events[-1].finish_reason == "length"
        assert (limit > 1) or drafter.asked == 0
        assert engine.stats.drafted_tokens <= max(0, limit - 2)
    prompt = prompt_of(2, CONTEXT - 5)
    known = lab.greedy(prompt, 5)
    events = list(lab.engine(sequences=1, drafter=Oracle({prompt: known}, lambda d: d)).generate(Request(prompt)))
    assert answer(events) == known


def test_an_end_token_at_every_place_of_a_block(lab: Lab) -> None:
    prompt = prompt_of(11, 10)
    known = lab.greedy(prompt, 14)
    for place, end in enumerate(known):
        if end in known[:place]:
            continue
        events = list(
            lab.engine(ends=(end,), drafter=Oracle({prompt: known}, lambda d: d)).generate(
                Request(prompt, max_tokens=14)
            )
        )
        assert answer(events) == known[: place + 1]
        assert events[-1].finish_reason == "stop"
