"""Whatever fails, wherever: a step becomes real for all of its sequences or for none, and no page is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from state_toy import HYBRID, Oracle, Toy, audit, draft, run

from dotllm.batch import Batch
from dotllm.errors import OutOfMemory, StateError
from dotllm.ops.protocol import PAGE
from dotllm.ops.reference import NumpyOps
from dotllm.state.blocks import BlockPool
from dotllm.state.manager import Extend, StateManager
from dotllm.state.manager import Sequence as Handle


class FaultError(Exception):
    """Raised on purpose."""


class FailingOps(NumpyOps):
    """Raises in the call number `fail` of any op, counted from when it is set."""

    def __init__(self) -> None:
        self.calls, self.fail = 0, -1

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail:
                raise FaultError(f"call {self.fail}: {name}")
            return found(*args, **kwargs)

        return counted


class Counter:
    """A participant: the number of rows, which must follow the length of its sequence."""

    def __init__(self) -> None:
        self.rows = self.saved = 0
        self.fail: str | None = None

    def _at(self, place: str) -> None:
        if self.fail == place:
            raise FaultError(place)

    def begin(self) -> None:
        self._at("begin")
        self.saved = self.rows

    def commit(self, n: int) -> None:
        self.rows += n
        self._at("commit")

    def abort(self) -> None:
        self.rows = self.saved
        self._at("abort")

    def snapshot(self) -> object:
        self._at("snapshot")
        return self.rows

    def restore(self, saved: object) -> None:
        assert isinstance(saved, int)
        self.rows = saved
        self._at("restore")

    def digest(self) -> bytes:
        return self.rows.to_bytes(4, "little")


# every line when a long run is asked for, else every fifth one
STRIDE = 1 if "DOTLLM_STATE_STEPS" in os.environ else 5
Whole = tuple[int, list[tuple[bytes, int, int]]]
PROMPTS = ([1, 2, 3] * 11, [4, 5], [6] * (PAGE - 1))  # the first writes in a shared last page, see `scene`
BLOCKS = ([7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18])
COUNTS = (2, 4, 1)


class Scene:
    """Three sequences with a step to come that replays, flips, copies a shared page, drafts and takes new pages."""

    def __init__(self) -> None:
        self.ops = FailingOps()
        self.toy = Toy(HYBRID, self.ops)
        self.state = StateManager(self.ops, HYBRID, pages=12, sequences=3, mtp=True, logged_rows=32)
        self.sequences = [self.state.open() for _ in PROMPTS]
        self.counters = [Counter() for _ in PROMPTS]
        for sequence, counter in zip(self.sequences, self.counters, strict=True):
            sequence.participants.append(counter)
        run(self.toy, self.state, [(s, p, len(p)) for s, p in zip(self.sequences, PROMPTS, strict=True)])
        # the MTP track too: its last page is partly filled and shared
        run(self.toy, self.state, [(self.sequences[0], [1], 1)], drafts=1, history=[PROMPTS[0]])
        self.snapshot = self.state.snapshot(self.sequences[0])
        self.before = self.observe()

    def observe(self) -> list[tuple[bytes, int, int]]:
        pairs = zip(self.sequences, self.counters, strict=True)
        return [(self.state.digest(s), s.length, c.rows) for s, c in pairs]

    def step(self) -> None:
        histories = [[*PROMPTS[0], 1], *PROMPTS[1:]]
        work = [(s, b, n) for s, b, n in zip(self.sequences, BLOCKS, COUNTS, strict=True)]
        run(self.toy, self.state, work, drafts=3, history=histories)

    def check(self) -> bool:
        """Nothing or everything has happened; True for everything."""
        audit(self.state, snapshots=1)
        after = self.observe()
        for (_, length, rows), (_, old, _) in zip(after, self.before, strict=True):
            assert length == rows, "participants and state have parted"
            assert length >= old
        if after == self.before:
            return False
        assert [length for _, length, _ in after] == [
            length + n for (_, length, _), n in zip(self.before, COUNTS, strict=True)
        ]
        return True


@pytest.fixture(scope="module")
def whole() -> Whole:
    """Calls of ops in the step, and what it leads to."""
    scene = Scene()
    scene.ops.calls = 0
    scene.step()
    calls = scene.ops.calls
    assert scene.check()
    return calls, scene.observe()


def test_a_fault_in_any_op_leaves_everything_as_it_was(whole: Whole) -> None:
    calls, expected = whole
    assert calls > 40
    for fail in range(1, calls + 1):
        scene = Scene()
        scene.ops.calls, scene.ops.fail = 0, fail
        with pytest.raises(FaultError):
            scene.step()
        scene.ops.fail = -1
        assert not scene.check(), f"op call {fail}"
        scene.step()  # after the failure the step gives what it would have given at once
        assert scene.check()
        assert scene.observe() == expected


@pytest.mark.parametrize("place", ["begin", "commit", "abort"])
@pytest.mark.parametrize("which", range(3))
def test_a_fault_in_a_participant_undoes_the_others(place: str, which: int, whole: Whole) -> None:
    scene = Scene()
    scene.counters[which].fail = place
    if place == "abort":
        with pytest.raises(FaultError, match="abort"), scene.state.begin([Extend(s, 1) for s in scene.sequences]):
            pass
    else:
        with pytest.raises(FaultError, match=place):
            scene.step()
    scene.counters[which].fail = None
    assert not scene.check()
    scene.step()
    assert scene.check()
    assert scene.observe() == whole[1]


def test_a_pool_that_runs_out_in_the_middle_of_a_plan_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, take, calls, fail = Scene(), BlockPool.take, 0, -1

    def failing(pool: BlockPool, count: int) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        if calls == fail:
            raise OutOfMemory("no more")
        return take(pool, count)

    monkeypatch.setattr(BlockPool, "take", failing)
    for take_number in range(1, 7):
        calls, fail = 0, take_number
        with pytest.raises(OutOfMemory):
            scene.step()
        assert not scene.check()
    fail = -1
    scene.step()
    assert scene.check()


def test_a_pool_that_is_too_small_says_so_and_lets_a_smaller_plan_pass() -> None:
    toy = Toy(HYBRID)
    state = StateManager(toy.ops, HYBRID, pages=3, sequences=2, mtp=True, logged_rows=64)
    first, second = state.open(), state.open()
    run(toy, state, [(first, [1] * 40, 40)])
    before = state.digest(first)
    with pytest.raises(OutOfMemory, match=r"key/value cache: 2 pages of 32 positions are needed and 1 of 3 are free"):
        state.begin([Extend(first, 20), Extend(second, 33)])
    audit(state)
    assert state.digest(first) == before
    run(toy, state, [(first, [2] * 20, 20), (second, [3] * 32, 32)])
    audit(state)
    assert state.free_pages == 0


def interrupted(at: int, action: Callable[[], object]) -> bool:
    """Run `action`, raising KeyboardInterrupt before the line number `at` (counted) executed in dotllm/state."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if "dotllm/state/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
    return False


def test_an_interrupt_at_any_line_leaves_all_or_nothing(
    whole: Whole,
) -> None:
    outcomes = {True: 0, False: 0}
    scene, at = Scene(), 0
    while True:
        at += STRIDE
        if not interrupted(at, scene.step):
            break
        scene.state.abort()  # the interrupt may have hit `__exit__` itself
        done = settled(scene)
        outcomes[done] += 1
        if done:
            assert scene.observe() == whole[1]
            scene = Scene()
    assert scene.observe() == whole[1]
    assert outcomes[False] > 900 // STRIDE
    assert outcomes[True] > 3 // STRIDE


def settled(scene: Scene) -> bool:
    """Check the scene; counts that were interrupted are mended by the next change, here a snapshot."""
    scene.state.snapshot(scene.sequences[1]).release()
    return scene.check()


ACTIONS: dict[str, Callable[[Scene], object]] = {
    "open": lambda scene: scene.state.open(),
    "close": lambda scene: scene.state.close(scene.sequences[1]),
    "snapshot": lambda scene: scene.state.snapshot(scene.sequences[0]),
    "restore": lambda scene: scene.state.restore(scene.snapshot),
    "release": lambda scene: scene.snapshot.release(),
    "flush": lambda scene: scene.state.flush(scene.sequences[:2], lambda *_: None),
}


@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_an_interrupt_at_any_line_of_other_changes_loses_no_page(action: str) -> None:
    at, hit = 0, True
    while hit:
        at += STRIDE
        scene = Scene()
        state, first = scene.state, scene.sequences[0]
        state.close(scene.sequences[2])
        before = state.digest(first)
        hit = interrupted(at, partial(ACTIONS[action], scene))
        state.abort()
        state.snapshot(first).release()
        audit(state)
        assert action == "flush" or state.digest(first) == before
        for snapshot in list(state._store.snapshots.values()):
            snapshot.release()
        for number in list(state._store.records):
            state.close(Handle(state._store, number, []))
        assert state.used_pages == 0
        assert state.free_sequences == 3
    assert at > 5


def test_an_error_of_the_model_aborts_and_the_state_can_go_on() -> None:
    scene = Scene()
    plan = [Extend(s, 4, partial=True, draft=3) for s in scene.sequences]

    def broken(reached: int) -> None:
        with scene.state.begin(plan) as step:
            if reached > 0:
                draft(scene.toy, step, [[*PROMPTS[0], 1, 7], [*PROMPTS[1], 11], [*PROMPTS[2], 15]], 3)
            if reached > 1:
                batch = Batch.build(list(BLOCKS), [s.length for s in scene.sequences], [0] * 3)
                scene.toy.forward(batch, step)
            assert scene.observe() == scene.before  # also while rows are being computed
            if reached > 2:
                step.commit([2, 9, 1], np.zeros((12, 8), np.float32))
            raise FaultError

    for reached in range(4):
        with pytest.raises(StateError if reached > 2 else FaultError):
            broken(reached)
        assert not scene.check()


def test_commit_that_is_refused_aborts_with_its_block() -> None:
    scene = Scene()
    with pytest.raises(StateError), scene.state.begin([Extend(s, 1) for s in scene.sequences]) as step:
        step.commit([1, 1], None)
    assert not step.open
    assert not scene.check()


def test_restored_participants_follow_the_snapshot() -> None:
    scene = Scene()
    scene.step()
    scene.state.close(scene.sequences[1])
    counter = Counter()
    sequence = scene.state.restore(scene.snapshot, [counter])
    assert counter.rows == sequence.length == len(PROMPTS[0]) + 1
    assert scene.state.digest(sequence) == scene.before[0][0]
    scene.state.close(sequence)
    counter.fail = "restore"
    with pytest.raises(FaultError):
        scene.state.restore(scene.snapshot, [counter])
    assert scene.state.free_sequences == 1
    audit(scene.state)
    with pytest.raises(StateError, match="2 participants to restore; the snapshot holds 1"):
        scene.state.restore(scene.snapshot, [Counter(), Counter()])


def test_the_scene_does_what_it_claims() -> None:
    scene = Scene()
    store = scene.state._store
    record = store.record(scene.sequences[0])
    assert store.main.pool.shared(record.pages[-1])
    assert record.length % PAGE
    assert store.mtp is not None
    assert store.mtp.pool.shared(record.mtp_pages[-1])
    assert record.mtp_length % PAGE
    scene.step()
    after = store.record(scene.sequences[0])
    assert after.pages[0] == record.pages[0]
    assert after.pages[1] != record.pages[1]
    oracle = Oracle(HYBRID)
    scene.sequences[0].participants.clear()
    tokens = [*PROMPTS[0], 1, *BLOCKS[0][:2]]
    assert scene.state.digest(scene.sequences[0]) == oracle.digest(tokens, after.mtp_length)
