"""The rules of the state one by one, and what it says when they are broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from state_toy import ATTENTION, HYBRID, Oracle, Toy, audit, catch_up, draft, run

from dotllm.batch import Batch
from dotllm.errors import OutOfMemory, StateError
from dotllm.state.layout import KvShape, StateLayout
from dotllm.state.manager import Extend, StateManager
from dotllm.state.manager import Sequence as Handle


def open_state(layout: StateLayout = HYBRID, **options: Any) -> tuple[Toy, StateManager]:
    toy = Toy(layout)
    return toy, StateManager(toy.ops, layout, **{"pages": 8, "sequences": 2, "logged_rows": 16, **options})


def batch(*parts: tuple[int, Sequence[int]]) -> Batch:
    return Batch.build([list(tokens) for _, tokens in parts], [first for first, _ in parts], [0] * len(parts))


def test_slots_are_limited_and_used_again() -> None:
    _, state = open_state()
    first = state.open()
    state.open()
    assert state.free_sequences == 0
    with pytest.raises(OutOfMemory, match="all 2 sequences of the state are open"):
        state.open()
    state.close(first)
    third = state.open()
    assert third.id != first.id
    with pytest.raises(StateError, match=f"sequence {first.id} is closed"):
        _ = first.length
    assert repr(first) == f"Sequence({first.id}, closed)"
    assert repr(third) == f"Sequence({third.id}, length 0)"


def test_a_slot_that_is_used_again_starts_empty() -> None:
    toy, state = open_state(sequences=1)
    for _ in range(3):
        sequence = state.open()
        assert state.digest(sequence) == Oracle(HYBRID, mtp=False).digest([], 0)
        run(toy, state, [(sequence, [1, 2, 3], 3)])
        state.close(sequence)


def test_options_are_checked() -> None:
    with pytest.raises(StateError, match="no MTP head"):
        open_state(ATTENTION, mtp=True)
    with pytest.raises(StateError, match="at least 1"):
        open_state(sequences=0)
    with pytest.raises(StateError, match="key/value cache: a pool of 0 pages"):
        open_state(pages=0)


# ---- plans and batches
def test_plans_are_checked_before_anything_changes() -> None:
    toy, state = open_state()
    a, b = state.open(), state.open()
    _, other = open_state()
    stranger = other.open()
    for plan, message in (
        ([], "at least one sequence"),
        ([Extend(a, 1), Extend(a, 1)], "comes twice"),
        ([Extend(a, -1)], "cannot be negative"),
        ([Extend(a, 1, draft=-1)], "cannot be negative"),
        ([Extend(a, 13), Extend(b, 4, partial=True)], "has 17 rows; recurrent layers can log 16"),
        ([Extend(stranger, 1)], "belongs to another state"),
    ):
        with pytest.raises(StateError, match=message):
            state.begin(plan)
        assert state.free_pages == 8
    run(toy, state, [(a, [1] * 17, 17)])  # rows that no commit cuts are not logged
    audit(state)


def test_one_step_at_a_time_and_its_sequences_stay() -> None:
    _, state = open_state()
    a, b = state.open(), state.open()
    with state.begin([Extend(a, 1)]) as step:
        with pytest.raises(StateError, match="a step is open"):
            state.begin([Extend(b, 1)])
        for change, word in (
            (lambda: state.close(a), "closed"),
            (lambda: state.snapshot(a), "copied"),
            (lambda: state.truncate(a, 0), "cut"),
        ):
            with pytest.raises(StateError, match=f"takes part in the open step and cannot be {word} now"):
                change()
        state.close(b)  # others may come and go
        state.open()
    with pytest.raises(StateError, match="this step has ended"):
        step.bind(batch((0, [1])))
    with pytest.raises(StateError, match="this step has ended"):
        step.commit([0], None)
    state.close(a)
    audit(state)


def test_batches_are_checked_against_the_plan() -> None:
    _, state = open_state()
    a, b = state.open(), state.open()
    with state.begin([Extend(a, 2), Extend(b, 1)]) as step:
        for rows, message in (
            (batch((0, [1])), "the plan has 2 sequences"),
            (batch((0, [1, 2, 3]), (0, [1])), "has 3 rows in the batch; the plan allows 1 .. 2"),
            (batch((0, [1]), (0, [])), "has 0 rows in the batch"),
            (batch((1, [1]), (0, [1])), "positions of sequence 0 must go on from its length, 0"),
            (Batch(*[np.array(x, np.int32) for x in ([1, 2], [0, 0], [1, 1, 2], [])]), "in parts"),
            (Batch(*[np.array(x, np.int32) for x in ([1, 2, 3], [0, 2, 0], [0, 2, 3], [])]), "positions of"),
        ):
            with pytest.raises(StateError, match=message):
                step.bind(rows)
        rows = step.bind(batch((0, [1, 2]), (0, [3])))
        assert rows.starts.tolist() == [0, 2, 3]
        assert rows.sequence.tolist() == [0, 0, 1]
        assert rows.positions.tolist() == [0, 1, 0]
        assert rows.read.tolist() == [0, 2]
        assert rows.write.tolist() == [1, 3]
        assert {array.dtype for array in (rows.starts, rows.sequence, rows.positions, rows.pages, rows.read)} == {
            np.dtype(np.int32)
        }
        assert len(set(rows.pages[:, 0].tolist())) == 2
        with pytest.raises(StateError, match="has bound a batch already"):
            step.bind(batch((0, [1, 2]), (0, [3])))


def test_commit_takes_all_or_none_unless_partial() -> None:
    toy, state = open_state()
    a, b = state.open(), state.open()
    for counts, message in (
        ([1], "given 1 sequences"),
        ([3, 0], "3 rows to commit, but the batch has 2"),
        ([-1, 0], "-1 rows to commit"),
        ([1, 0], "did not say `partial`"),
    ):
        with state.begin([Extend(a, 3), Extend(b, 1)]) as step:
            hidden = toy.forward(batch((0, [1, 2]), (0, [3])), step)
            with pytest.raises(StateError, match=message):
                step.commit(counts, hidden)
    with state.begin([Extend(a, 3), Extend(b, 1)]) as step:
        step.commit([0, 0], toy.forward(batch((0, [1, 2]), (0, [3])), step))
    assert (a.length, b.length, state.used_pages) == (0, 0, 0)
    with pytest.raises(StateError, match="but the batch has 0"), state.begin([Extend(a, 1)]) as step:
        step.commit([1], None)


def test_planes_change_places_only_with_commit() -> None:
    toy, state = open_state()
    a = state.open()
    seen = []
    for n in (2, 0, 1, None, 2):
        with state.begin([Extend(a, 2, partial=True)]) as step:
            rows = batch((a.length, [1, 2]))
            seen.append(int(state._store.record(a).read))
            hidden = toy.forward(rows, step)
            if n is not None:
                step.commit([n], hidden)
    assert seen == [0, 1, 1, 0, 0]


def test_buffers_are_one_set_or_one_a_layer() -> None:
    _, state = open_state()
    a = state.open()
    with state.begin([Extend(a, 3)]) as step:
        assert np.shares_memory(step.buffers(0, 3).u, step.buffers(1, 3).u)
        shapes = [array.shape for array in step.buffers(0, 2)]
        assert shapes == [(2, 16), (2, 1, 4), (2, 1, 4), (2, 2, 4), (2, 2), (2, 2)]
        with pytest.raises(StateError, match="buffers of 4 rows"):
            step.buffers(0, 4)
        with pytest.raises(StateError, match="there are 2 layers"):
            step.buffers(2, 1)
    with state.begin([Extend(a, 3, partial=True)]) as step:
        assert not np.shares_memory(step.buffers(0, 3).u, step.buffers(1, 3).u)
    with pytest.raises(StateError, match="this step has ended"):
        step.buffers(0, 1)


# ---- cutting
def test_a_hybrid_sequence_is_never_cut() -> None:
    toy, state = open_state()
    a = state.open()
    run(toy, state, [(a, [1, 2, 3], 3)])
    for length in (0, 1, 3):
        with pytest.raises(StateError, match="take a snapshot at the place to return to"):
            state.truncate(a, length)
    assert a.length == 3


def test_cutting_is_checked() -> None:
    toy, state = open_state(ATTENTION)
    a = state.open()
    run(toy, state, [(a, [1, 2, 3], 3)])
    for length in (-1, 4):
        with pytest.raises(StateError, match=f"has 3 rows and cannot be cut to {length}"):
            state.truncate(a, length)
    a.participants.append(None)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="has participants"):
        state.truncate(a, 1)


def test_cutting_with_an_mtp_track_keeps_its_invariant() -> None:
    layout = StateLayout((KvShape(1, 4),), 0, None, KvShape(1, 4), 8, (0,))
    toy, state = open_state(layout, mtp=True)
    oracle, a, tokens = Oracle(layout), state.open(), list(range(30))
    run(toy, state, [(a, tokens[:9], 9)])
    catch_up(toy, state, [(a, tokens)])
    run(toy, state, [(a, tokens[9:12], 3)])
    run(toy, state, [(a, tokens[12:20], 8)])
    assert (a.mtp_length, a.pending_rows) == (9, 12)
    with pytest.raises(StateError, match=r"can be cut to 0 or to 9 \.\. 20 rows"):
        state.truncate(a, 8)
    for length in (20, 13, 12, 11, 9):
        state.truncate(a, length)
        assert state.digest(a) == oracle.digest(tokens[:length], 9)
        audit(state)
    state.truncate(a, 0)
    assert state.digest(a) == oracle.digest([], 0)
    run(toy, state, [(a, tokens, 30)])
    assert state.digest(a) == oracle.digest(tokens, 0)


# ---- snapshots
def test_released_and_foreign_snapshots_are_refused() -> None:
    toy, state = open_state(mtp=True)
    a = state.open()
    run(toy, state, [(a, [1, 2, 3], 3)])
    snapshot = state.snapshot(a)
    assert snapshot.length == 3
    assert snapshot.bytes == 2 * (4 * 2 * 4 * 4 + 4 * 3 * 16) + 4 * 8 * 4  # two layers of S and window, four rows
    _, other = open_state(mtp=True)
    with pytest.raises(StateError, match="belongs to another state"):
        other.restore(snapshot)
    snapshot.release()
    with pytest.raises(StateError, match="is released"):
        state.restore(snapshot)


def test_a_snapshot_outlives_its_sequence_and_blocks_its_pages() -> None:
    toy, state = open_state()
    a = state.open()
    run(toy, state, [(a, [1] * 40, 40)])
    snapshot = state.snapshot(a)
    state.close(a)
    assert state.used_pages == 2
    snapshot.release()
    assert state.used_pages == 0


def test_a_step_that_writes_no_main_row_copies_no_main_page() -> None:
    toy, state = open_state(mtp=True, pages=2)
    oracle, a, tokens = Oracle(HYBRID), state.open(), [3] * 40
    run(toy, state, [(a, tokens, 40)])
    snapshot = state.snapshot(a)
    assert state.free_pages == 0
    catch_up(toy, state, [(a, tokens)])
    assert state.digest(a) == oracle.digest(tokens, 40)
    snapshot.release()


def test_a_step_of_which_nothing_is_accepted_costs_no_page() -> None:
    toy, state = open_state(mtp=True)
    a = state.open()
    run(toy, state, [(a, [3] * 40, 40)])
    snapshot, used = state.snapshot(a), state.used_pages
    run(toy, state, [(a, [1, 2], 0)])
    assert state.used_pages == used  # the copy of the shared last page is given back
    run(toy, state, [(a, [1, 2], 1)])
    assert state.used_pages == used + 1
    snapshot.release()
    assert state.used_pages == used


# ---- the MTP track
def test_pending_rows_are_copies() -> None:
    toy, state = open_state(mtp=True)
    a = state.open()
    run(toy, state, [(a, [1, 2], 2)])
    before = state.digest(a)
    toy.out[...] = 7
    assert state.digest(a) == before
    assert [chunk.shape for chunk in a.pending] == [(1, 8), (2, 8)]
    assert not a.pending[0].any()


def test_mtp_passes_are_checked() -> None:
    toy, state = open_state(mtp=True)
    a, b = state.open(), state.open()
    run(toy, state, [(a, [1, 2, 3], 3)])
    with state.begin([Extend(a, 3, partial=True, draft=2), Extend(b, 1)]) as step:
        with pytest.raises(StateError, match="consume all pending rows before drafting on"):
            step.mtp_rows([0])
        with pytest.raises(StateError, match="5 pending rows are asked for, 4 are left"):
            step.mtp_consume([0], [5])
        with pytest.raises(StateError, match="must differ"):
            step.mtp_consume([0, 0], [1, 1])
        with pytest.raises(StateError, match="the plan allows a draft of 0 after 0 rows"):
            step.mtp_consume([1])
        rows, hidden = step.mtp_consume([0], [3])
        assert rows.positions.tolist() == [0, 1, 2]
        assert hidden.shape == (3, 8)
        with pytest.raises(StateError, match="consume all"):
            step.mtp_rows([0])
        rows, hidden = step.mtp_consume([0])
        assert rows.positions.tolist() == [3]
        assert np.array_equal(hidden[0], a.pending[-1][-1])
        assert step.mtp_rows([0]).positions.tolist() == [4]
        with pytest.raises(StateError, match="would reach position 5"):
            step.mtp_rows([0])
        with pytest.raises(StateError, match="it has drafted already"):
            step.mtp_consume([0])
    assert (a.mtp_length, a.pending_rows) == (0, 4)  # the step was aborted
    audit(state)


def test_a_row_of_the_head_is_durable_only_with_its_token() -> None:
    toy, state = open_state(mtp=True)
    oracle, a = Oracle(HYBRID), state.open()
    run(toy, state, [(a, [1, 2, 3], 3)])
    with state.begin([Extend(a, 2, partial=True, draft=1)]) as step:
        draft(toy, step, [[1, 2, 3, 9]], 1)  # token 9 may come at position 3
        hidden = toy.forward(batch((3, [9, 8])), step)
        step.commit([0], hidden)  # but it does not
    assert (a.mtp_length, a.pending_rows) == (3, 1)
    assert state.digest(a) == oracle.digest([1, 2, 3], 3)
    run(toy, state, [(a, [5], 1)], drafts=2, history=[[1, 2, 3]])
    assert state.digest(a) == oracle.digest([1, 2, 3, 5], 4)


def test_commit_wants_the_hidden_rows_of_the_batch() -> None:
    toy, state = open_state(mtp=True)
    a = state.open()
    for hidden in (None, np.zeros((3, 8), np.float32), np.zeros((2, 7), np.float32)):
        with state.begin([Extend(a, 2)]) as step:
            toy.forward(batch((0, [1, 2])), step)
            with pytest.raises(StateError, match=r"needs the hidden rows \(2, 8\)"):
                step.commit([2], hidden)
    assert a.length == 0


def test_flush_of_several_sequences() -> None:
    toy, state = open_state(mtp=True)
    oracle, a, b = Oracle(HYBRID), state.open(), state.open()
    run(toy, state, [(b, [4] * 33, 33)])
    catch_up(toy, state, [(a, []), (b, [4] * 33)])
    assert (a.mtp_length, a.pending_rows) == (0, 1)
    assert (b.mtp_length, b.pending_rows) == (33, 1)
    run(toy, state, [(a, [1, 2], 2), (b, [5], 1)])
    catch_up(toy, state, [(a, [1, 2]), (b, [4] * 33 + [5])])
    assert state.digest(a) == oracle.digest([1, 2], 2)
    assert state.digest(b) == oracle.digest([4] * 33 + [5], 34)
    audit(state)


def test_no_track_without_mtp() -> None:
    toy, state = open_state()
    a = state.open()
    run(toy, state, [(a, [1], 1)])
    assert (a.pending, a.mtp_length, state.mtp) == ((), 0, False)
    with state.begin([Extend(a, 1, draft=3)]) as step:
        assert step.mtp_kv is None
        with pytest.raises(StateError, match="no MTP track"):
            step.mtp_rows([0])
    state.flush([a], lambda *_: pytest.fail("nothing is pending"))


# ---- digests
def test_digest_tells_histories_apart_and_nothing_else() -> None:
    toy, state = open_state(mtp=True, sequences=2)
    digests = set()
    for tokens in ([1, 2, 3], [1, 2], [1, 2, 4], [2, 1, 3], []):
        sequence = state.open()
        if tokens:
            run(toy, state, [(sequence, tokens, len(tokens))])
        digests.add(state.digest(sequence))
        other: Handle = state.open()  # other pages, slot and planes
        for token in tokens:
            run(toy, state, [(other, [token], 1)])
        assert state.digest(other) == state.digest(sequence)
        state.close(sequence)
        state.close(other)
    assert len(digests) == 5
