"""Which requests run in the next step, and how many rows each of them gets.

Requests start in order of arrival, when a slot and all pages that they can ever need are free: one that runs is never
short of memory later. In a step the answers come first, one row each and its drafts; what is left of the row budget
goes to prompts, oldest first. Every prompt is finite, so none waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dotllm.engine.request import Request
from dotllm.engine.stats import Meter, RequestStats
from dotllm.errors import DotLLMError, OutOfMemory, StateError, UsageError
from dotllm.spec.verify import Cursor
from dotllm.state import manager as state
from dotllm.state.blocks import pages_for

__all__ = ["Active", "Entry", "Scheduler"]


@dataclass(slots=True, eq=False)
class Active:
    """A request at work, or waiting for it."""

    id: int
    request: Request
    cursor: Cursor
    meter: Meter = field(default_factory=Meter)
    opened: state.Sequence | None = None

    @property
    def sequence(self) -> state.Sequence:
        if self.opened is None:
            raise StateError(f"request {self.id} waits and has no state yet")
        return self.opened

    @property
    def decoding(self) -> bool:
        """Is the prompt done, and the answer begun?"""
        return self.cursor.generated > 0

    @property
    def stats(self) -> RequestStats:
        return self.meter.read(self.cursor.prompt_tokens, self.cursor.generated)


@dataclass(frozen=True, slots=True)
class Entry:
    """One request's part in a step: `rows` known tokens from position `start`, then at most `depth` drafts.

    `logits`: the rows reach the end of what is known, so the last of them, and each draft, gives a token.
    """

    active: Active
    start: int
    rows: int
    depth: int
    logits: bool

    @property
    def extend(self) -> state.Extend:
        return state.Extend(self.active.sequence, self.rows + self.depth, partial=self.depth > 0, draft=self.depth)

    def tokens(self, drafts: Sequence[int]) -> list[int]:
        return [*self.active.cursor.history[self.start : self.start + self.rows], *drafts]


class Scheduler:
    """Keeps the waiting and the running; `depth` says how many drafts a request would like."""

    def __init__(
        self,
        manager: state.StateManager,
        *,
        context: int,
        max_rows: int,
        chunk: int,
        depth: Callable[[Cursor], int],
    ) -> None:
        if not 1 <= chunk <= max_rows:
            raise UsageError(f"A prefill chunk of {chunk} rows does not fit in steps of 1 .. {max_rows} rows.")
        self.waiting: deque[Active] = deque()
        self.running: list[Active] = []
        self._state, self._depth = manager, depth
        self._context, self._max_rows, self._chunk = context, max_rows, chunk
        self._suspects: set[int] = set()

    # ---- who is here
    def add(self, active: Active) -> None:
        """Queue a request; raises OutOfMemory if it could not run even alone."""
        need = self._pages(active)
        if need > self._state.pages:
            raise OutOfMemory(
                f"The request needs {need} pages of key/value cache, and there are {self._state.pages}; ask for fewer "
                f"tokens or start with a larger context."
            )
        self.waiting.append(active)

    def admit(self) -> list[tuple[Active, DotLLMError]]:
        """Start as many of the waiting as fit, in order; returns those that cannot be started at all, and why."""
        refused = []
        while self.waiting and (not self.running or self._fits(self.waiting[0])) and len(self.running) < self._max_rows:
            active = self.waiting.popleft()
            try:
                self._open(active)
            except DotLLMError as error:
                refused.append((active, error))
            else:
                self.running.append(active)
        return refused

    def remove(self, active: Active) -> None:
        """Take a request out, wherever it is, and give its state back."""
        self._suspects.discard(active.id)
        if active in self.waiting:
            self.waiting.remove(active)
        if active in self.running:
            self.running.remove(active)
        if active.opened is not None:
            opened, active.opened = active.opened, None
            self._state.close(opened)

    def find(self, number: int) -> Active | None:
        return next((active for active in (*self.running, *self.waiting) if active.id == number), None)

    # ---- the plan
    def schedule(self) -> tuple[Entry, ...]:
        """The parts of the next step; empty if nothing runs."""
        runnable = self.running
        if self._suspects:  # find out which one fails: alone, and without drafts
            runnable = [active for active in self.running if active.id in self._suspects][:1]
        answers = [active for active in runnable if active.decoding][: self._max_rows]
        prompts = [active for active in runnable if not active.decoding]
        depths = self._depths(answers, bool(prompts))
        most = self._max_rows if not any(depths) else min(self._max_rows, self._state.logged_rows)
        left = min(self._chunk, most - len(answers) - sum(depths))
        plan = [self._entry(active, 1, depth) for active, depth in zip(answers, depths, strict=True)]
        for active in prompts:
            rows = min(left, self._until(active))
            if rows > 0:
                plan.append(self._entry(active, rows, 0))
                left -= rows
        return tuple(plan)

    def _depths(self, answers: Sequence[Active], prompts: bool) -> list[int]:
        """Drafts granted to each answer: what it likes and has room for, within the rows that one step may log.

        Beside prompts, drafts take at most half of what the answers leave.
        """
        left = min(self._max_rows, self._state.logged_rows) - len(answers)
        left = left // 2 if prompts else left
        depths = []
        for active in answers:
            likes = 0 if self._suspects else self._depth(active.cursor)
            depths.append(max(0, min(likes, active.cursor.room - 1, left)))
            left -= depths[-1]
        return depths

    def _until(self, active: Active) -> int:
        """Prompt rows up to the end of the prompt, or to the place of its checkpoint."""
        length, checkpoint = active.sequence.length, active.request.checkpoint
        end = len(active.cursor.history)
        if checkpoint is not None and length < checkpoint:
            end = checkpoint
        return end - length

    def _entry(self, active: Active, rows: int, depth: int) -> Entry:
        start = active.sequence.length
        return Entry(active, start, rows, depth, logits=start + rows == len(active.cursor.history))

    # ---- failures
    def succeeded(self, plan: Iterable[Entry]) -> None:
        self._suspects -= {entry.active.id for entry in plan}

    def failed(self, plan: Sequence[Entry]) -> Active | None:
        """A step failed and was undone. Each of its requests is tried again alone; the one that then fails is named."""
        numbers = {entry.active.id for entry in plan}
        if len(plan) == 1 and numbers <= self._suspects:
            return plan[0].active
        self._suspects |= numbers
        return None

    # ---- memory
    def _pages(self, active: Active) -> int:
        """Pages that the request can need at most.

        A page that it shares with a checkpoint is copied before it is written: one for the checkpoint it goes on from,
        one for the checkpoint that it makes.
        """
        shared = (active.request.resume is not None) + (active.request.checkpoint is not None)
        return pages_for(len(active.cursor.history) + active.cursor.room) + shared

    def _fits(self, active: Active) -> bool:
        promised = sum(max(0, self._pages(other) - pages_for(other.sequence.length)) for other in self.running)
        return self._state.free_sequences > 0 and self._fresh(active) <= self._state.free_pages - promised

    def _fresh(self, active: Active) -> int:
        """Pages to take, beside those that are shared with the checkpoint that it goes on from."""
        resumed = active.request.resume
        return self._pages(active) - (0 if resumed is None else pages_for(len(resumed.tokens)))

    def _open(self, active: Active) -> None:
        if not self._fits(active):
            raise OutOfMemory(
                f"The request needs {self._fresh(active)} pages of key/value cache and a free sequence; "
                f"{self._state.free_pages} of {self._state.pages} pages and {self._state.free_sequences} sequences are "
                f"free. Release checkpoints, or start with a larger context."
            )
        resumed = active.request.resume
        if resumed is None:
            active.opened = self._state.open()
        else:
            active.opened = self._state.restore(resumed.snapshot)
            active.meter.cached = len(resumed.tokens)
        active.sequence.participants.append(active.cursor)
