"""Each answer is that of the model alone, whatever runs beside it and however the prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import CONTEXT, Lab, answer, events_of, prompt_of, run_all, text_of

from dotllm.engine.request import Request
from dotllm.errors import ContextOverflow, OutOfMemory, UsageError
from dotllm.ops.select import select_ops
from dotllm.sampling.params import SamplingParams


@pytest.fixture(params=["hybrid", "hybrid_numpy", "dense"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_greedy_equals_the_loop_written_by_hand(lab: Lab) -> None:
    for seed, length in ((0, 1), (1, 33), (2, 70)):
        prompt = prompt_of(seed, length)
        events = list(lab.engine(sequences=1).generate(Request(prompt, max_tokens=12)))
        assert answer(events) == lab.greedy(prompt, 12)
        assert [event.finish_reason for event in events] == [None] * 11 + ["length"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunk_size_does_not_change_the_answer(lab: Lab, chunk: int) -> None:
    prompt = prompt_of(3, 75)
    sampling = SamplingParams(temperature=1.0, seed=5, top_logprobs=4)
    expected = list(lab.engine().generate(Request(prompt, sampling, max_tokens=10)))
    events = list(lab.engine(chunk=chunk).generate(Request(prompt, sampling, max_tokens=10)))
    assert [(e.token, e.text, e.logprob, e.top) for e in events] == [
        (e.token, e.text, e.logprob, e.top) for e in expected
    ]


@pytest.mark.parametrize("together", range(1, 9))
def test_any_number_at_once_with_others_coming_and_going(hybrid: Lab, together: int) -> None:
    _come_and_go(hybrid, together)


def test_several_at_once_on_the_definition(lab: Lab) -> None:
    _come_and_go(lab, 3)


def _come_and_go(lab: Lab, together: int) -> None:
    rng = random.Random(together)
    requests = [
        Request(
            prompt_of(100 * together + i, rng.randrange(1, 60)),
            SamplingParams(
                temperature=rng.choice([0.0, 0.9]), seed=i, repeat_penalty=rng.choice([1.0, 1.3]), top_logprobs=1
            ),
            max_tokens=rng.randrange(1, 12),
        )
        for i in range(together + 2)
    ]
    engine = lab.engine(sequences=together, chunk=rng.choice([5, 16, 512]))
    numbers, events, cancelled = [], [], set()
    for request in requests:
        numbers.append(engine.submit(request))
        for _ in range(rng.randrange(4)):
            events += engine.step()
        if rng.random() < 0.2 and engine.cancel(numbers[-1]):
            cancelled.add(numbers[-1])
    events += run_all(engine)
    assert engine.state.used_pages == 0
    for number, request in zip(numbers, requests, strict=True):
        expected = list(lab.engine(sequences=1).generate(request))
        got = events_of(events, number)
        if number in cancelled:
            assert answer(got) == answer(expected)[: len(answer(got))]
            assert not any(e.finish_reason for e in got)
        else:
            assert [(e.token, e.text, e.logprob) for e in got] == [(e.token, e.text, e.logprob) for e in expected]
            assert got[-1].finish_reason == expected[-1].finish_reason


def test_a_seed_gives_the_same_words_and_another_seed_others(lab: Lab) -> None:
    prompt = prompt_of(9, 20)

    def words(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return answer(list(lab.engine().generate(Request(prompt, sampling, max_tokens=12))))

    assert words(4) == words(4)
    assert len({tuple(words(seed)) for seed in range(6)}) > 3


def test_an_end_token_ends_with_stop_and_counts(lab: Lab) -> None:
    prompt = prompt_of(11, 10)
    whole = lab.greedy(prompt, 16)
    end = next(t for i, t in enumerate(whole) if i >= 3 and t not in whole[:i])
    length = whole.index(end) + 1
    events = list(lab.engine(ends=(end,)).generate(Request(prompt, max_tokens=16)))
    assert answer(events) == whole[:length]
    assert (events[-1].finish_reason, events[-1].text, events[-1].stop) == ("stop", "", None)
    assert events[-1].stats is not None
    assert events[-1].stats.generated_tokens == length
    ignoring = list(lab.engine(ends=(end,)).generate(Request(prompt, max_tokens=16, ignore_eos=True)))
    assert end not in answer(ignoring)
    assert ignoring[-1].finish_reason == "length"


def test_a_stop_string_over_several_tokens_is_found_and_never_shown(lab: Lab) -> None:
    prompt = prompt_of(12, 10)
    text = text_of(list(lab.engine().generate(Request(prompt, max_tokens=16))))
    stop = text[5:8]
    events = list(lab.engine().generate(Request(prompt, max_tokens=16, stop=("never", stop))))
    assert text_of(events) == text[: text.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop) == ("stop", stop)


def test_the_context_ends_an_answer_exactly(lab: Lab) -> None:
    for length in (CONTEXT - 1, CONTEXT - 3):
        events = list(lab.engine(sequences=1).generate(Request(prompt_of(1, length))))
        assert len(answer(events)) == CONTEXT - length
        assert events[-1].finish_reason == "length"


def test_what_can_never_be_answered_is_refused_at_the_door(lab: Lab) -> None:
    engine = lab.engine(sequences=1, pages=3)
    with pytest.raises(UsageError, match="no tokens"):
        engine.submit(Request(()))
    with pytest.raises(UsageError, match="token 304"):
        engine.submit(Request((1, 304)))
    with pytest.raises(ContextOverflow, match=f"{CONTEXT} tokens and the context {CONTEXT}"):
        engine.submit(Request(prompt_of(0, CONTEXT)))
    with pytest.raises(UsageError, match="max_tokens"):
        engine.submit(Request((1,), max_tokens=0))
    with pytest.raises(UsageError, match="empty"):
        engine.submit(Request((1,), stop=("",)))
    with pytest.raises(UsageError, match="logit_bias"):
        engine.submit(Request((1,), SamplingParams(logit_bias={304: 1.0})))
    with pytest.raises(UsageError, match="checkpoint"):
        engine.submit(Request((1, 2), checkpoint=3))
    with pytest.raises(OutOfMemory, match="pages"):
        engine.submit(Request(prompt_of(0, 60), max_tokens=50))
    assert not engine.has_work
    assert engine.state.used_pages == 0


def test_requests_wait_for_pages_and_none_fails_for_lack_of_them(lab: Lab) -> None:
    engine = lab.engine(sequences=8, pages=7)  # room for two at a time
    requests = [Request(prompt_of(i, 40), max_tokens=30) for i in range(5)]
    numbers = [engine.submit(request) for request in requests]
    events = engine.step()
    assert (engine.running, engine.waiting) == (2, 3)
    events += run_all(engine)
    assert engine.state.used_pages == 0
    for number in numbers:
        assert len(answer(events_of(events, number))) == 30
        assert events_of(events, number)[-1].finish_reason == "length"


def test_cancel_gives_everything_back_at_any_time(lab: Lab) -> None:
    engine = lab.engine(sequences=1, chunk=8)
    running, waiting = (engine.submit(Request(prompt_of(i, 40), max_tokens=20)) for i in range(2))
    engine.step()  # in the middle of the prompt
    assert engine.cancel(waiting)
    assert engine.cancel(running)
    assert not engine.cancel(running)
    assert not engine.has_work
    assert engine.state.used_pages == 0
    events = engine.generate(Request(prompt_of(3, 5), max_tokens=20))
    next(events)
    events.close()  # a reader that goes away cancels
    assert not engine.has_work
    assert engine.state.used_pages == 0
    assert engine.stats.cancelled_requests == 3


def test_statistics_add_up(lab: Lab) -> None:
    engine = lab.engine(chunk=16)
    events = list(engine.generate(Request(prompt_of(5, 40), max_tokens=6)))
    stats = events[-1].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.prefill_tokens, stats.cached_tokens) == (40, 40, 0)
    assert (stats.generated_tokens, stats.decode_tokens) == (6, 5)
    assert 0 < stats.sampling_ms < stats.total_ms
    assert 0 < stats.first_token_ms <= stats.total_ms
    assert stats.prefill_ms + stats.decode_ms <= stats.total_ms
    assert (engine.stats.prompt_tokens, engine.stats.generated_tokens, engine.stats.steps) == (40, 6, 3 + 5)


def test_threads_do_not_change_the_answer(tiny_gguf: Callable[..., Path]) -> None:
    """Nor do they change the log probabilities, also with several requests in one step."""
    requests = [
        Request(prompt_of(i, 20 + 30 * i), SamplingParams(temperature=0.7, seed=i, top_logprobs=3), max_tokens=8)
        for i in range(3)
    ]
    answers = []
    for threads in (1, 2):
        engine = Lab(tiny_gguf("qwen35", "Q8_0"), select_ops("cpu", threads)).engine(chunk=48)
        numbers = [engine.submit(request) for request in requests]
        events = run_all(engine)
        answers.append([[(e.token, e.logprob, e.top) for e in events_of(events, number)] for number in numbers])
    assert answers[0] == answers[1]
