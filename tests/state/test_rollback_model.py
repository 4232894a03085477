"""Rollback under a real model: a tiny qwen35 with an MTP head, forced rejections at every position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dotllm.batch import Batch
from dotllm.gguf.reader import GGUFFile
from dotllm.models.registry import load_model
from dotllm.ops.protocol import KvLayer, Rows
from dotllm.ops.select import select_ops
from dotllm.state.layout import StateLayout
from dotllm.state.manager import Extend, StateManager
from dotllm.state.manager import Sequence as Handle

K_SIZES = {"embedding": 256, "feed_forward": 256, "layers": 2, "head_dim": 64, "state": 64}
PROMPT = [17, 4, 250, 33, 91, 8, 120, 64, 3, 77, 201]


class Driver:
    """A model with its state, driven by tokens that the test dictates."""

    def __init__(self, path: Path, ops: Any) -> None:
        self.known: dict[tuple[int, ...], tuple[bytes, Any]] = {}
        self.file = GGUFFile.open(path)
        self.ops = ops
        self.model = load_model(self.file, self.ops, context=128)
        assert self.model.mtp is not None
        self.head = self.model.mtp
        self.layout = StateLayout.of(self.model.config)
        self.state = StateManager(self.ops, self.layout, pages=8, sequences=3, mtp=True, logged_rows=64)

    def step(self, work: Sequence[tuple[Handle, Sequence[int], int]], known: Sequence[Sequence[int]] = ()) -> Any:
        """(sequence, tokens, how many to commit) each; logits of the last committed row. `known`: draft first."""
        depth = max(len(tokens) for _, tokens, _ in work) - 1 if known else 0
        plan = [Extend(s, len(t), partial=n not in (0, len(t)), draft=depth) for s, t, n in work]
        with self.state.begin(plan) as step:
            if depth:
                self.draft(step, [[*k, t[0]] for k, (_, t, _) in zip(known, work, strict=True)], depth)
            batch = Batch.build([list(t) for _, t, _ in work], [s.length for s, _, _ in work], [0] * len(work))
            hidden = self.model.forward(batch, step)
            last = [int(start) + n - 1 for start, (_, _, n) in zip(batch.starts, work, strict=False) if n]
            logits = self.ops.get(self.model.logits(hidden, np.array(last, np.int32))).copy() if last else None
            step.commit([n for _, _, n in work], hidden)
        return logits

    def draft(self, step: Any, tokens: Sequence[Sequence[int]], depth: int) -> None:
        which = range(len(tokens))
        rows, hidden = step.mtp_consume(which)
        wanted = np.array([tokens[s][p] for s, p in zip(rows.sequence, rows.positions, strict=True)], np.int32)
        for drafted in range(1, depth + 1):
            logits, own = self.head.forward(wanted, hidden, rows, step.mtp_kv, logits=True)
            hidden = own[rows.starts[1:] - 1].copy()
            wanted = np.argmax(logits, axis=1)[rows.starts[1:] - 1].astype(np.int32)
            if drafted < depth:
                rows = step.mtp_rows(which)

    def catch_up(self, pairs: Sequence[tuple[Handle, Sequence[int]]]) -> None:
        late = [(s, t) for s, t in pairs if s.pending_rows > 1]

        def run(rows: Rows, hidden: Any, kv: KvLayer) -> None:
            tokens = [late[s][1][p] for s, p in zip(rows.sequence, rows.positions, strict=True)]
            self.head.forward(np.array(tokens, np.int32), hidden, rows, kv, logits=False)

        self.state.flush([s for s, _ in pairs], run)

    def plain(self, tokens: Sequence[int]) -> tuple[bytes, Any]:
        """Digest and last logits after the tokens one by one, everything pending flushed after each."""
        if tuple(tokens) in self.known:
            return self.known[tuple(tokens)]
        sequence = self.state.open()
        for position, token in enumerate(tokens):
            logits = self.step([(sequence, [token], 1)])
            self.catch_up([(sequence, tokens[: position + 1])])
        digest = self.state.digest(sequence)
        self.state.close(sequence)
        return self.known.setdefault(tuple(tokens), (digest, logits))


@pytest.fixture(scope="module", params=[("numpy", "Q8_0"), ("cpu", "Q8_0"), ("cpu", "Q4_K")], ids="-".join)
def driver(request: pytest.FixtureRequest, tiny_gguf: Callable[..., Path]) -> Iterator[Driver]:
    backend, kind = request.param
    driver = Driver(tiny_gguf("qwen35", kind, **(K_SIZES if kind == "Q4_K" else {})), select_ops(backend, 2))
    with driver.file:
        yield driver
        assert driver.state.used_pages == 0


@pytest.mark.parametrize("k", range(1, 5))
def test_rejection_at_every_position(driver: Driver, k: int) -> None:
    block = [5, 140, 22, 9, 60][: k + 1]
    for n in range(k + 2):
        sequence = driver.state.open()
        driver.step([(sequence, PROMPT, len(PROMPT))])
        logits = driver.step([(sequence, block, n)], known=[PROMPT])
        kept = PROMPT + block[:n]
        assert sequence.mtp_length == len(PROMPT) + (n > 0)
        driver.catch_up([(sequence, kept)])
        digest, expected = driver.plain(kept)
        assert driver.state.digest(sequence) == digest
        assert n == 0 or np.array_equal(logits[0], expected[0])
        after = driver.step([(sequence, [1], 1)])
        assert np.array_equal(after[0], driver.plain([*kept, 1])[1][0])
        driver.state.close(sequence)


def test_unlike_sequences_in_one_step(driver: Driver) -> None:
    prompts, blocks, counts = [PROMPT, PROMPT[:1], PROMPT[3:] * 4], [[2, 3, 4], [5, 6, 7], [8, 9, 10]], (1, 3, 2)
    sequences = [driver.state.open() for _ in prompts]
    driver.step([(s, p, len(p)) for s, p in zip(sequences, prompts, strict=True)])
    driver.step(list(zip(sequences, blocks, counts, strict=True)), known=prompts)
    kept = [p + b[:n] for p, b, n in zip(prompts, blocks, counts, strict=True)]
    driver.catch_up(list(zip(sequences, kept, strict=True)))
    digests = [driver.state.digest(s) for s in sequences]
    for sequence in sequences:
        driver.state.close(sequence)
    assert digests == [driver.plain(tokens)[0] for tokens in kept]


@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_chunks_of_a_prompt_pair_hidden_rows_alike(driver: Driver, chunk: int) -> None:
    sequence = driver.state.open()
    for start in range(0, len(PROMPT), chunk):
        part = PROMPT[start : start + chunk]
        driver.step([(sequence, part, len(part))])
        if start % 2 == 0:
            driver.catch_up([(sequence, PROMPT)])
    driver.catch_up([(sequence, PROMPT)])
    assert (sequence.mtp_length, sequence.pending_rows) == (len(PROMPT), 1)
    assert driver.state.digest(sequence) == driver.plain(PROMPT)[0]
    driver.state.close(sequence)


def test_going_on_from_a_snapshot(driver: Driver) -> None:
    origin = driver.state.open()
    driver.step([(origin, PROMPT, len(PROMPT))])
    driver.step([(origin, [7, 8, 9], 2)], known=[PROMPT])
    snapshot, history = driver.state.snapshot(origin), [*PROMPT, 7, 8]
    driver.step([(origin, [1, 2, 3], 1)], known=[history])
    twin = driver.state.restore(snapshot)
    snapshot.release()
    driver.step([(twin, [30, 31, 32], 2)], known=[history])
    for sequence, tokens in ((origin, [*history, 1]), (twin, [*history, 30, 31])):
        driver.catch_up([(sequence, tokens)])
        digest = driver.state.digest(sequence)
        driver.state.close(sequence)
        assert digest == driver.plain(tokens)[0]
