"""Random histories of several sequences against a recomputation of each from its tokens alone.

DOTLLM_STATE_STEPS=100000 asks for about that many steps; the suite takes a short form.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from state_toy import ATTENTION, HYBRID, Oracle, Toy, audit, catch_up, draft

from dotllm.batch import Batch
from dotllm.errors import OutOfMemory, StateError
from dotllm.ops.protocol import PAGE
from dotllm.state.manager import Extend, Sequence, Snapshot, StateManager

PAGES, SLOTS, LONGEST = 5, 3, 3 * PAGE + 2
LENGTH = 40  # rules of one example
COUNT = [0]

TOYS = {True: Toy(HYBRID), False: Toy(ATTENTION)}
ORACLES = {True: Oracle(HYBRID), False: Oracle(ATTENTION, mtp=False)}

tokens = st.lists(st.integers(0, 31), min_size=1, max_size=6)
lengths = st.sampled_from([1, 2, 5, PAGE - 1, PAGE, PAGE + 1])
prompts = st.builds(lambda n, seed: [(seed + i * i) % 32 for i in range(n)], lengths, st.integers(0, 3))


@dataclass(eq=False)
class Model:
    """What the machine believes of one sequence."""

    handle: Sequence
    tokens: list[int] = field(default_factory=list)
    mtp_length: int = 0


class StateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: list[Model] = []
        self.kept: list[tuple[Snapshot, list[int], int]] = []

    @initialize(hybrid=st.booleans())
    def start(self, hybrid: bool) -> None:
        self.hybrid = hybrid
        self.toy, self.oracle = TOYS[hybrid], ORACLES[hybrid]
        if len(self.oracle.known) > 4000:
            self.oracle.known = {(): self.oracle.known[()]}
        self.state = StateManager(
            self.toy.ops, self.toy.layout, pages=PAGES, sequences=SLOTS, mtp=hybrid, logged_rows=256
        )
        self.live.append(Model(self.state.open()))

    # ---- sequences come and go
    @precondition(lambda self: len(self.live) < SLOTS)
    @rule()
    def open(self) -> None:
        self.live.append(Model(self.state.open()))
        if len(self.live) == SLOTS:
            with pytest.raises(OutOfMemory):
                self.state.open()

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.live))
        self.state.close(model.handle)
        self.live.remove(model)

    @precondition(lambda self: len(self.kept) < 4)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.live))
        self.kept.append((self.state.snapshot(model.handle), list(model.tokens), model.mtp_length))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))[0].release()

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, history, mtp_length = data.draw(st.sampled_from(self.kept))
        if len(self.live) == SLOTS:
            self.state.close(self.live.pop(0).handle)
        self.live.append(Model(self.state.restore(snapshot), list(history), mtp_length))

    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data: st.DataObject, share: float) -> None:
        model = data.draw(st.sampled_from(self.live))
        length = int(share * len(model.tokens))
        if self.hybrid:
            with pytest.raises(StateError):
                self.state.truncate(model.handle, length)
            return
        self.state.truncate(model.handle, length)
        del model.tokens[length:]

    # ---- steps
    def some(self, data: st.DataObject) -> list[Model]:
        return data.draw(st.lists(st.sampled_from(self.live), min_size=1, max_size=SLOTS, unique=True))

    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        models = self.some(data)
        self.step(data, models, [False] * len(models), 0)

    @rule(data=st.data(), depth=st.integers(0, 4))
    def verify(self, data: st.DataObject, depth: int) -> None:
        models = self.some(data)
        self.step(data, models, [True] * len(models), depth)

    @rule(data=st.data(), depth=st.integers(0, 4))
    def mixed(self, data: st.DataObject, depth: int) -> None:
        models = self.some(data)
        self.step(data, models, [data.draw(st.booleans()) for _ in models], depth)

    def step(self, data: st.DataObject, models: list[Model], verify: list[bool], depth: int) -> None:
        """Prompts and verifies in one step that commits, or leaves without."""
        depth *= self.hybrid
        kinds = [(m, tokens if v else prompts) for m, v in zip(models, verify, strict=True)]
        blocks = [data.draw(kind)[: max(1, LONGEST - len(m.tokens))] for m, kind in kinds]
        spare = data.draw(st.integers(0, 3))
        work = list(zip(models, blocks, verify, strict=True))
        try:
            step = self.state.begin([Extend(m.handle, len(b) + spare, partial=v, draft=depth) for m, b, v in work])
        except OutOfMemory:
            if len(self.kept) > 2:
                self.kept.pop(0)[0].release()
            elif len(self.live) > 1:
                self.state.close(self.live.pop(0).handle)
            return
        with step:
            if depth:
                draft(self.toy, step, [[*m.tokens, b[0]] for m, b, _ in work], depth)
            batch = Batch.build(blocks, [len(m.tokens) for m in models], [0] * len(models))
            hidden = self.toy.forward(batch, step)
            self.compare()
            if data.draw(st.integers(0, 4)) == 4:
                return
            counts = [data.draw(st.integers(0, len(b)) if v else st.sampled_from([len(b), 0])) for _, b, v in work]
            step.commit(counts, hidden)
            hidden[...] = -1  # the model writes over its rows
        for (model, block, _), n in zip(work, counts, strict=True):
            if depth:
                model.mtp_length = len(model.tokens) + (n > 0)
            model.tokens += block[:n]

    @precondition(lambda self: self.hybrid)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        models = self.some(data)
        try:
            catch_up(self.toy, self.state, [(m.handle, m.tokens) for m in models])
        except OutOfMemory:
            return
        for model in models:
            model.mtp_length = len(model.tokens)

    # ---- what always holds
    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "state"):
            COUNT[0] += 1
            audit(self.state, snapshots=len(self.kept))
            self.compare()

    def compare(self) -> None:
        assert len(self.live) == SLOTS - self.state.free_sequences
        for model in self.live:
            assert (model.handle.length, model.handle.mtp_length) == (len(model.tokens), model.mtp_length)
            assert self.state.digest(model.handle) == self.oracle.digest(model.tokens, model.mtp_length)

    def teardown(self) -> None:
        if hasattr(self, "state"):
            for model in self.live:
                self.state.close(model.handle)
            for snapshot, _, _ in self.kept:
                snapshot.release()
            audit(self.state, snapshots=0)
            assert self.state.used_pages == 0


def test_random_histories_equal_their_recomputation() -> None:
    asked = os.environ.get("DOTLLM_STATE_STEPS")
    COUNT[0] = 0
    while COUNT[0] < int(asked or 300):
        run_state_machine_as_test(
            StateMachine,
            settings=settings(
                max_examples=500 if asked else 15,
                stateful_step_count=LENGTH,
                deadline=None,
                database=None,
                derandomize=not asked,
                suppress_health_check=list(HealthCheck),
            ),
        )
