"""Going on from a checkpoint gives what a cold run gives, and saves exactly the rows before it."""

from __future__ import annotations

import logging

import pytest
from engines import Lab, answer, events_of, prompt_of, run_all

from dotllm.engine.request import Checkpoint, Event, Request
from dotllm.errors import OutOfMemory, UsageError
from dotllm.sampling.params import SamplingParams


@pytest.fixture(params=["hybrid", "dense"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def checkpoint_of(events: list[Event]) -> Checkpoint:
    (found,) = [event.checkpoint for event in events if event.checkpoint is not None]
    return found


SAMPLING = SamplingParams(temperature=0.8, seed=6, repeat_penalty=1.3, repeat_last_n=-1, top_logprobs=2)


@pytest.mark.parametrize("place", [1, 32, 33, 64])
@pytest.mark.parametrize("chunk", [7, 512])
def test_a_resumed_run_equals_a_cold_one(lab: Lab, place: int, chunk: int) -> None:
    prompt = prompt_of(4, 64)
    engine = lab.engine(sequences=2, chunk=chunk)
    events = list(engine.generate(Request(prompt, SAMPLING, max_tokens=5, checkpoint=place)))
    cold = list(lab.engine().generate(Request(prompt, SAMPLING, max_tokens=5)))
    assert [(e.token, e.logprob) for e in events if e.token is not None] == [(e.token, e.logprob) for e in cold]
    checkpoint = checkpoint_of(events)
    assert checkpoint.tokens == prompt[:place]
    for tail in (prompt_of(5, 1), prompt_of(6, 30)):
        longer = prompt[:place] + tail
        cold = list(lab.engine().generate(Request(longer, SAMPLING, max_tokens=5)))
        for _ in range(2):  # a checkpoint can be used again
            rows = engine.stats.prompt_tokens
            warm = list(engine.generate(Request(longer, SAMPLING, max_tokens=5, resume=checkpoint)))
            assert [(e.token, e.text, e.logprob) for e in warm] == [(e.token, e.text, e.logprob) for e in cold]
            assert engine.stats.prompt_tokens - rows == len(tail)
            assert warm[-1].stats is not None
            assert (warm[-1].stats.cached_tokens, warm[-1].stats.prefill_tokens) == (place, len(tail))
    checkpoint.release()
    checkpoint.release()
    assert engine.state.used_pages == 0


def test_a_chain_of_checkpoints_as_a_conversation_makes_it(lab: Lab) -> None:
    engine, history, kept = lab.engine(sequences=1), prompt_of(0, 20), None
    for turn in range(4):
        request = Request(history, max_tokens=6, checkpoint=len(history), resume=kept)
        events = list(engine.generate(request))
        assert answer(events) == lab.greedy(history, 6)
        if kept is not None:
            kept.release()
        kept = checkpoint_of(events)
        history = (*history, *answer(events), *prompt_of(100 + turn, 5))
    assert kept is not None
    kept.release()
    assert engine.state.used_pages == 0


def test_several_at_once_from_one_checkpoint(lab: Lab) -> None:
    engine = lab.engine(sequences=4, chunk=16)
    prompt = prompt_of(7, 45)
    checkpoint = checkpoint_of(list(engine.generate(Request(prompt, max_tokens=1, checkpoint=45))))
    longer = [prompt + prompt_of(i, 3 + 20 * i) for i in range(4)]
    numbers = [engine.submit(Request(p, max_tokens=9, resume=checkpoint)) for p in longer]
    checkpoint_events = run_all(engine)
    for number, whole in zip(numbers, longer, strict=True):
        assert answer(events_of(checkpoint_events, number)) == lab.greedy(whole, 9)


def test_a_checkpoint_that_does_not_fit_is_refused(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    engine, prompt = lab.engine(), prompt_of(8, 20)
    checkpoint = checkpoint_of(list(engine.generate(Request(prompt, max_tokens=1, checkpoint=20))))
    for wrong in (prompt, prompt_of(9, 30), prompt[:10]):
        with pytest.raises(UsageError, match="beginning of the prompt"):
            engine.submit(Request(wrong, resume=checkpoint))
    with pytest.raises(UsageError, match="20 resumed"):
        engine.submit(Request((*prompt, 5), checkpoint=20, resume=checkpoint))
    checkpoint.release()
    with caplog.at_level(logging.CRITICAL):
        (event,) = list(engine.generate(Request((*prompt, 5), resume=checkpoint)))
    assert event.finish_reason == "error"
    assert "released" in str(event.error)
    assert not engine.has_work


def test_pages_held_by_checkpoints_are_told_when_nothing_else_can_run(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    engine = lab.engine(sequences=2, pages=5)
    checkpoint = checkpoint_of(list(engine.generate(Request(prompt_of(1, 90), max_tokens=1, checkpoint=90))))
    request = Request(prompt_of(2, 90), max_tokens=4)
    with caplog.at_level(logging.CRITICAL):
        (event,) = list(engine.generate(request))
    assert "Release checkpoints" in str(event.error)
    checkpoint.release()
    assert answer(list(engine.generate(request))) == lab.greedy(request.prompt, 4)


def test_pages_that_are_copied_are_reckoned_with(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Both checkpoints end within a page: with exactly the pages it takes no step fails, with one less none begins."""
    for pages, runs in ((5, True), (4, False)):
        engine = lab.engine(sequences=1, pages=pages)
        prompt = prompt_of(1, 45)
        kept = checkpoint_of(list(engine.generate(Request(prompt[:40], max_tokens=1, checkpoint=40))))
        request = Request(prompt, max_tokens=30, checkpoint=45, resume=kept)
        if runs:
            events = list(engine.generate(request))
            assert answer(events) == lab.greedy(prompt, 30)
        else:
            with caplog.at_level(logging.CRITICAL), pytest.raises(OutOfMemory, match="5 pages"):
                engine.submit(request)
        assert engine.stats.failed_steps == 0
