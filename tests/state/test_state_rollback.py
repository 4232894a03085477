"""A rejected draft is as if it had never happened: bit for bit, in every part of the state."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from state_toy import ATTENTION, HYBRID, Oracle, Toy, audit, catch_up, run

from dotllm.ops.protocol import PAGE
from dotllm.state.manager import Sequence, StateManager


def manager(
    toy: Toy, *, pages: int = 24, sequences: int = 3, cache_type: str = "f16", mtp: bool = True
) -> StateManager:
    return StateManager(
        toy.ops, toy.layout, pages=pages, sequences=sequences, cache_type=cache_type, mtp=mtp, logged_rows=64
    )


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 32, count).tolist()


@pytest.mark.parametrize("k", range(1, 9))
def test_rejection_at_every_position_equals_plain_decoding(k: int) -> None:
    toy, oracle = Toy(HYBRID), Oracle(HYBRID)
    state = manager(toy)
    prompt = tokens(k, 5)
    for n in range(1, k + 2):
        sequence = state.open()
        run(toy, state, [(sequence, prompt, len(prompt))])
        block = tokens(100 + n, k + 1)
        run(toy, state, [(sequence, block, n)], drafts=k, history=[prompt])
        kept = prompt + block[:n]
        assert sequence.length == len(kept)
        assert sequence.mtp_length == len(prompt) + 1
        assert state.digest(sequence) == oracle.digest(kept, sequence.mtp_length)
        run(toy, state, [(sequence, [3, 4], 2)])  # what comes after sees nothing of it either
        catch_up(toy, state, [(sequence, [*kept, 3, 4])])
        assert sequence.mtp_length == sequence.length
        assert state.digest(sequence) == oracle.digest([*kept, 3, 4], sequence.mtp_length)
        state.close(sequence)
        audit(state)
        assert state.used_pages == 0


@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_several_sequences_accept_different_counts_in_one_step(cache_type: str) -> None:
    toy, oracle = Toy(HYBRID), Oracle(HYBRID, cache_type)
    for counts in product((0, 1, 3, 4), repeat=3):
        state = manager(toy, cache_type=cache_type)
        prompts = [tokens(i, 3 + i) for i in range(3)]
        sequences = [state.open() for _ in prompts]
        run(toy, state, [(s, p, len(p)) for s, p in zip(sequences, prompts, strict=True)])
        blocks = [tokens(20 + i, 4) for i in range(3)]
        work = [(s, b, n) for s, b, n in zip(sequences, blocks, counts, strict=True)]
        run(toy, state, work, drafts=3, history=prompts)
        for sequence, prompt, block, n in zip(sequences, prompts, blocks, counts, strict=True):
            assert sequence.mtp_length == len(prompt) + (n > 0)
            assert state.digest(sequence) == oracle.digest(prompt + block[:n], sequence.mtp_length)
        audit(state)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 2, 2 * PAGE])
def test_rollback_across_the_edge_of_a_page(length: int) -> None:
    toy, oracle = Toy(HYBRID), Oracle(HYBRID)
    prompt = tokens(length, length)
    for n in range(5):
        state = manager(toy)
        sequence = state.open()
        run(toy, state, [(sequence, prompt, length)])
        block = tokens(n, 4)
        run(toy, state, [(sequence, block, n)], drafts=3, history=[prompt])
        assert state.digest(sequence) == oracle.digest(prompt + block[:n], sequence.mtp_length)
        assert state._store.main.pool.used == -(-(length + n) // PAGE)  # surplus pages are free again
        audit(state)


def test_many_rejections_leak_nothing() -> None:
    toy, oracle = Toy(HYBRID), Oracle(HYBRID)
    state = manager(toy, pages=5)
    sequence, history = state.open(), tokens(1, 4)
    run(toy, state, [(sequence, history, 4)])
    rng = np.random.default_rng(2)
    for round_ in range(120):
        block = tokens(round_, 6)
        n = int(rng.random() < 0.5)
        run(toy, state, [(sequence, block, n)], drafts=5, history=[history])
        history += block[:n]
        assert state._store.main.pool.used == -(-len(history) // PAGE)
    assert state.digest(sequence) == oracle.digest(history, sequence.mtp_length)
    audit(state)


def test_chunks_of_a_prompt_give_one_state() -> None:
    toy, oracle, prompt = Toy(HYBRID), Oracle(HYBRID), tokens(5, 70)
    for chunk in (1, 7, 31, 32, 33, 70):
        state = manager(toy)
        sequence = state.open()
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            run(toy, state, [(sequence, part, len(part))])
            catch_up(toy, state, [(sequence, prompt)])
        assert (sequence.mtp_length, sequence.pending_rows) == (70, 1)
        assert state.digest(sequence) == oracle.digest(prompt, 70)


def test_depth_may_change_and_be_zero() -> None:
    toy, oracle = Toy(HYBRID), Oracle(HYBRID)
    state = manager(toy)
    sequence, history = state.open(), []
    for round_, (depth, n) in enumerate([(3, 2), (0, 1), (0, 1), (2, 3), (1, 1), (0, 1), (4, 1), (1, 2)]):
        block = tokens(round_, depth + 1)
        run(toy, state, [(sequence, block, n)], drafts=depth, history=[history])
        history += block[:n]
        assert state.digest(sequence) == oracle.digest(history, sequence.mtp_length)
    audit(state)


def test_attention_only_models_need_no_replay() -> None:
    toy, oracle = Toy(ATTENTION), Oracle(ATTENTION, mtp=False)
    state = manager(toy, mtp=False)
    sequence: Sequence = state.open()
    run(toy, state, [(sequence, tokens(1, 30), 30)])
    run(toy, state, [(sequence, tokens(2, 6), 3)])
    history = tokens(1, 30) + tokens(2, 6)[:3]
    assert state.digest(sequence) == oracle.digest(history, 0)
    for length in (33, 32, 31, 7, 0):
        state.truncate(sequence, length)
        assert state.digest(sequence) == oracle.digest(history[:length], 0)
        audit(state)
    assert state.used_pages == 0


def test_snapshots_share_pages_and_copy_on_write() -> None:
    toy, oracle = Toy(HYBRID), Oracle(HYBRID)
    state = manager(toy, sequences=4)
    origin, prompt = state.open(), tokens(9, 40)
    run(toy, state, [(origin, prompt, 40)])
    used, before = state.used_pages, state.digest(origin)
    snapshot = state.snapshot(origin)
    twins = [state.restore(snapshot) for _ in range(2)]
    assert state.used_pages == used
    assert {state.digest(s) for s in (origin, *twins)} == {before}
    tails = [tokens(60 + i, 5) for i in range(3)]
    for sequence, tail, n in zip((origin, *twins), tails, (5, 2, 0), strict=True):
        run(toy, state, [(sequence, tail, n)], drafts=4, history=[prompt])
        assert state.digest(sequence) == oracle.digest(prompt + tail[:n], sequence.mtp_length)
        audit(state, snapshots=1)
    for sequence in (origin, *twins):
        state.close(sequence)
    late = state.restore(snapshot)
    assert state.digest(late) == before
    snapshot.release()
    snapshot.release()
    assert snapshot.released
    pages = state._store.record(late).pages
    run(toy, state, [(late, tails[0], 5)])
    assert state._store.record(late).pages == pages  # alone again: written in place
    state.close(late)
    audit(state, snapshots=0)
    assert state.used_pages == 0
