"""The engine: one loop, `step`, which everything else - command line, server, benchmark, trace - drives."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dotllm.batch import Batch
from dotllm.engine.request import Checkpoint, Event, Request
from dotllm.engine.scheduler import Active, Entry, Scheduler
from dotllm.engine.stats import EngineStats
from dotllm.errors import UsageError
from dotllm.models.base import Model
from dotllm.ops.protocol import Array, Ops
from dotllm.spec.drafter import Drafter, NoDrafter
from dotllm.spec.verify import Cursor, Verdict, verify
from dotllm.state.manager import StateManager, Step
from dotllm.text.stream import TextStream, TokenBytes

__all__ = ["Engine", "Tokens"]

logger = logging.getLogger(__name__)

NEVER = float("-inf")


class Tokens(TokenBytes, Protocol):
    """What the engine wants of a tokenizer."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end an answer."""


class Engine:
    """Answers requests with one model, many at once; the words of each are those it would get alone.

    `context` positions a request, prompt and answer together; a step has at most `max_rows` rows, at most `chunk` of
    them of prompts.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokens,
        state: StateManager,
        ops: Ops,
        *,
        context: int,
        max_rows: int = 512,
        chunk: int = 512,
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.tokenizer, self.state, self.context = model, tokenizer, state, context
        self.stats = EngineStats()
        self._ops, self._drafter = ops, drafter or NoDrafter()
        self._scheduler = Scheduler(state, context=context, max_rows=max_rows, chunk=chunk, depth=self._drafter.depth)
        self._numbers = itertools.count(1)

    # ---- requests
    def submit(self, request: Request) -> int:
        """Queue a request and return its number, by which its events are known.

        Raises UsageError, ContextOverflow or OutOfMemory for one that can never be answered.
        """
        request.check(self.model.config.vocab_size, self.context)
        active = Active(next(self._numbers), request, self._cursor(request))
        self._scheduler.add(active)
        self.stats.requests += 1
        return active.id

    def cancel(self, number: int) -> bool:
        """Drop a request wherever it stands, without further events; False if it has ended already."""
        active = self._scheduler.find(number)
        if active is None:
            return False
        self._scheduler.remove(active)
        self.stats.cancelled_requests += 1
        return True

    def generate(self, request: Request) -> Iterator[Event]:
        """The events of one request, with nothing else at work; closing the iterator cancels it."""
        if self.has_work:
            raise UsageError("The engine is at work; use submit and step to answer several requests at once.")
        number = self.submit(request)
        try:
            while self._scheduler.find(number):
                yield from self.step()
        finally:
            self.cancel(number)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Requests that have state."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for pages."""
        return len(self._scheduler.waiting)

    # ---- the loop
    def step(self) -> list[Event]:
        """One pass of the model over some rows of every running request; all of it happens, or nothing.

        A failure undoes the step. The requests in it are then tried one by one, and the one that fails again ends with
        an error event. KeyboardInterrupt passes through: before the commit the step has not happened; one that comes
        between the commit and the return loses the events of that step, so cancel what was running.
        """
        refused = self._admit()
        plan = self._scheduler.schedule()
        if not plan:
            return refused
        started = time.perf_counter()
        try:
            with self.state.begin([entry.extend for entry in plan]) as step:
                drafts = self._propose(plan, step)
                batch = _batch(plan, drafts)
                hidden = self.model.forward(batch, step)
                logits = self._logits(hidden, batch.logit_rows)
                verdicts = self._verify(plan, drafts, logits)
                step.commit(_accepted(plan, verdicts), hidden)
        except Exception as error:
            return refused + self._failed(plan, error)
        return refused + self._emit(plan, drafts, verdicts, time.perf_counter() - started)

    def _admit(self) -> list[Event]:
        return [self._end_with_error(active, error) for active, error in self._scheduler.admit()]

    def _propose(self, plan: Sequence[Entry], step: Step) -> Sequence[Sequence[int]]:
        cursors = [entry.active.cursor for entry in plan]
        return self._drafter.propose(step, cursors, [entry.depth for entry in plan])

    def _logits(self, hidden: Array, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """(len(rows), V) on the host."""
        if not len(rows):
            return np.empty((0, self.model.config.vocab_size), np.float32)
        logits: NDArray[np.float32] = self._ops.get(self.model.logits(hidden, rows))
        return logits

    def _verify(
        self, plan: Sequence[Entry], drafts: Sequence[Sequence[int]], logits: NDArray[np.float32]
    ) -> list[Verdict]:
        """A verdict an entry, in order; an entry without logits has an empty one."""
        verdicts, row = [], 0
        for entry, guessed in zip(plan, drafts, strict=True):
            if not entry.logits:
                verdicts.append(Verdict((), None))
                continue
            started = time.perf_counter()
            end = row + 1 + len(guessed)
            verdicts.append(verify(entry.active.cursor, guessed, logits[row:end]))
            row = end
            entry.active.meter.sampling += time.perf_counter() - started
        return verdicts

    def _emit(
        self, plan: Sequence[Entry], drafts: Sequence[Sequence[int]], verdicts: Sequence[Verdict], seconds: float
    ) -> list[Event]:
        """Count what the step gave, take the checkpoints that are due, end what has ended."""
        events = []
        self._scheduler.succeeded(plan)
        self.stats.steps += 1
        for entry, guessed, verdict in zip(plan, drafts, verdicts, strict=True):
            active, cursor = entry.active, entry.active.cursor
            of_prompt = cursor.generated == len(verdict.tokens)
            active.meter.step(seconds, decoding=not of_prompt)
            self.stats.prompt_tokens += entry.rows if of_prompt else 0
            if entry.start + entry.rows == active.request.checkpoint and of_prompt:
                events += self._checkpoint(active, active.request.checkpoint)
            if verdict.tokens:
                active.meter.tokens(len(guessed), verdict.accepted)
                self.stats.drafted_tokens += len(guessed)
                self.stats.accepted_tokens += verdict.accepted
                self.stats.generated_tokens += len(verdict.tokens)
            events += [Event(active.id, t.token, t.text, t.logprob, t.top) for t in verdict.tokens]
            if verdict.finish:
                events[-1] = replace(
                    events[-1], finish_reason=verdict.finish, stop=cursor.text.stop_string, stats=active.stats
                )
                self._scheduler.remove(active)
        return events

    def _checkpoint(self, active: Active, length: int) -> list[Event]:
        try:
            snapshot = self.state.snapshot(active.sequence)
        except Exception:  # a checkpoint saves time later; the answer does not hang on it
            logger.warning("request %d: no checkpoint after %d tokens", active.id, length, exc_info=True)
            return []
        return [Event(active.id, checkpoint=Checkpoint(active.request.prompt[:length], snapshot))]

    def _failed(self, plan: Sequence[Entry], error: Exception) -> list[Event]:
        self.stats.failed_steps += 1
        culprit = self._scheduler.failed(plan)
        if culprit is None:
            logger.warning("a step of %d requests failed and is tried again", len(plan), exc_info=error)
            return []
        return [self._end_with_error(culprit, error)]

    def _end_with_error(self, active: Active, error: Exception) -> Event:
        logger.warning("request %d ends with an error", active.id, exc_info=error)
        self.stats.failed_requests += 1
        stats = active.stats
        self._scheduler.remove(active)
        return Event(active.id, finish_reason="error", error=error, stats=stats)

    def _cursor(self, request: Request) -> Cursor:
        sampling, ends = request.sampling, frozenset(self.tokenizer.end_ids)
        if request.ignore_eos:
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(ends, NEVER)})
        return Cursor(
            sampling,
            request.prompt,
            TextStream(self.tokenizer, request.stop),
            end_ids=ends,
            max_tokens=self.context if request.max_tokens is None else request.max_tokens,
            context=self.context,
        )


def _batch(plan: Sequence[Entry], drafts: Sequence[Sequence[int]]) -> Batch:
    return Batch.build(
        [entry.tokens(guessed) for entry, guessed in zip(plan, drafts, strict=True)],
        [entry.start for entry in plan],
        [1 + len(guessed) if entry.logits else 0 for entry, guessed in zip(plan, drafts, strict=True)],
    )


def _accepted(plan: Sequence[Entry], verdicts: Sequence[Verdict]) -> list[int]:
    """Rows of each entry that become real: all known tokens, and the drafts that were drawn."""
    return [entry.rows + verdict.accepted for entry, verdict in zip(plan, verdicts, strict=True)]
