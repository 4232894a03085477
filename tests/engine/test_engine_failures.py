"""A step that fails has not happened: not in the state, not in the words. One bad request cannot stop the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engines import Lab, answer, events_of, prompt_of, run_all

from dotllm.engine.engine import Engine
from dotllm.engine.request import Request
from dotllm.sampling.chain import SamplerChain
from dotllm.sampling.params import SamplingParams
from dotllm.spec.drafter import NoDrafter
from dotllm.spec.verify import Cursor
from dotllm.state.manager import StateManager, Step
from dotllm.text.stream import TextStream

LAYERS = ["propose", "batch", "forward", "logits", "get", "sample", "push", "commit", "begin", "cursor"]


class Fault:
    """Raises once armed, in place of the call that it is put before."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.armed, self.raised = error, False, 0

    def before(self, call: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self.armed:
                self.armed, self.raised = False, self.raised + 1
                raise self.error
            return call(*arguments, **named)

        return wrapped

    def after(self, call: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            if self.armed:
                self.armed, self.raised = False, self.raised + 1
                raise self.error
            return result

        return wrapped


def put(fault: Fault, layer: str, engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Plant the fault in one layer of an engine that runs."""
    if layer == "propose":
        patch.setattr(engine._drafter, "propose", fault.before(engine._drafter.propose))
    elif layer == "batch":
        patch.setattr(Step, "bind", fault.after(Step.bind))
    elif layer in ("forward", "logits"):  # after: the pages and the spare planes have been written
        patch.setattr(engine.model, layer, fault.after(getattr(engine.model, layer)))
    elif layer == "get":
        patch.setattr(engine._ops, "get", fault.before(engine._ops.get))
    elif layer == "sample":
        patch.setattr(SamplerChain, "sample", fault.after(SamplerChain.sample))
    elif layer == "push":
        patch.setattr(TextStream, "push", fault.after(TextStream.push))
    elif layer == "commit":
        patch.setattr(Step, "_check_accepted", fault.after(Step._check_accepted))
    elif layer == "begin":
        patch.setattr(engine.state, "begin", fault.before(engine.state.begin))
    else:
        patch.setattr(Cursor, "commit", fault.after(Cursor.commit))


REQUESTS = [
    Request(prompt_of(1, 30), max_tokens=10),
    Request(prompt_of(2, 9), SamplingParams(temperature=0.8, seed=4, repeat_penalty=1.2), max_tokens=10),
    Request(prompt_of(3, 60), max_tokens=6),
]


@pytest.fixture(scope="module")
def expected(hybrid: Lab) -> list[list[int]]:
    return [answer(list(hybrid.engine(sequences=1).generate(request))) for request in REQUESTS]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.usefixtures("quiet")
def test_a_failure_in_any_layer_leaves_state_and_words_alone(
    hybrid: Lab, expected: list[list[int]], layer: str, error: BaseException
) -> None:
    for steps, together in ((1, 3), (4, 1)):
        requests = REQUESTS[:together]
        engine = hybrid.engine(sequences=3, chunk=32, drafter=NoDrafter())
        numbers = [engine.submit(request) for request in requests]
        events = [event for _ in range(steps) for event in engine.step()]
        before = [engine.state.digest(active.sequence) for active in engine._scheduler.running]
        free = engine.state.free_pages
        fault = Fault(error)
        with pytest.MonkeyPatch.context() as patch:
            put(fault, layer, engine, patch)
            fault.armed = True
            if isinstance(error, Exception):
                assert engine.step() == []
            else:
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            assert fault.raised == 1
        assert [engine.state.digest(active.sequence) for active in engine._scheduler.running] == before
        assert engine.state.free_pages == free
        events += run_all(engine)
        assert [answer(events_of(events, number)) for number in numbers] == expected[:together]
        assert all(events_of(events, number)[-1].finish_reason == "length" for number in numbers)
        assert engine.state.used_pages == 0


class Poisoned:
    """The model, with logits that are not numbers after any row of `token`."""

    def __init__(self, model: Any, token: int) -> None:
        self.config, self.mtp, self._model, self._token = model.config, None, model, token
        self._tokens = np.zeros(0, np.int32)

    def forward(self, batch: Any, step: Any) -> Any:
        self._tokens = batch.tokens
        return self._model.forward(batch, step)

    def logits(self, hidden: Any, rows: Any) -> Any:
        logits = self._model.logits(hidden, rows)
        logits[self._tokens[rows] == self._token] = np.nan
        return logits


@pytest.mark.usefixtures("quiet")
def test_the_request_that_fails_ends_alone_with_an_error(hybrid: Lab, expected: list[list[int]]) -> None:
    poison = next(t for t in expected[1][2:] if not any(t in words for words in (expected[0], expected[2])))
    engine = hybrid.engine(model=Poisoned(hybrid.model, poison))
    numbers = [engine.submit(request) for request in REQUESTS]
    events = run_all(engine)
    words = [answer(events_of(events, number)) for number in numbers]
    assert (words[0], words[2]) == (expected[0], expected[2])
    assert words[1] == expected[1][: expected[1].index(poison) + 1]
    last = events_of(events, numbers[1])[-1]
    assert (last.finish_reason, last.token) == ("error", None)
    assert "finite" in str(last.error)
    assert last.stats is not None
    assert last.stats.generated_tokens == len(words[1])
    assert engine.state.used_pages == 0
    assert (engine.stats.failed_requests, engine.stats.failed_steps) == (1, 2)


@pytest.mark.usefixtures("quiet")
def test_a_drafter_that_always_fails_costs_no_request(hybrid: Lab, expected: list[list[int]]) -> None:
    class Broken(NoDrafter):
        def depth(self, cursor: Any) -> int:
            return 2

        def propose(self, step: Any, cursors: Any, depths: Any) -> Any:
            if any(depths):
                raise RuntimeError("planted")
            return super().propose(step, cursors, depths)

    events = list(hybrid.engine(drafter=Broken()).generate(REQUESTS[0]))
    assert answer(events) == expected[0]


@pytest.mark.usefixtures("quiet")
def test_state_is_whole_after_many_failures(hybrid: Lab, expected: list[list[int]]) -> None:
    """Every fifth step fails somewhere; nothing leaks and no word changes."""
    engine = hybrid.engine(chunk=16)
    assert isinstance(engine.state, StateManager)
    numbers, events, turn = [engine.submit(request) for request in REQUESTS], [], 0
    while engine.has_work:
        fault = Fault(RuntimeError("planted"))
        with pytest.MonkeyPatch.context() as patch:
            if turn % 5 == 4:
                put(fault, ["forward", "logits", "commit"][turn // 5 % 3], engine, patch)
                fault.armed = True
            events += engine.step()
        turn += 1
    assert [answer(events_of(events, number)) for number in numbers] == expected
    assert engine.stats.failed_steps >= 4
    assert engine.state.used_pages == 0
