"""What goes into the engine and what comes out: requests, checkpoints, events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dotllm.engine.stats import RequestStats
from dotllm.errors import ContextOverflow, UsageError
from dotllm.sampling.params import SamplingParams
from dotllm.spec.verify import FinishReason
from dotllm.state.manager import Snapshot

__all__ = ["Checkpoint", "EndReason", "Event", "Request"]

EndReason: TypeAlias = FinishReason | Literal["error"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after `tokens`; a later request whose prompt begins with them goes on from here.

    It holds memory until it is released.
    """

    tokens: tuple[int, ...]
    snapshot: Snapshot

    def release(self) -> None:
        """Give the memory back; a second release does nothing."""
        self.snapshot.release()


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it; `max_tokens` None is until the context ends.

    `stop` strings end the answer and are not part of it. `ignore_eos` forbids the tokens that end an answer.
    `checkpoint` n asks for a Checkpoint after exactly n tokens of the prompt; `resume` is one to go on from.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    checkpoint: int | None = None
    resume: Checkpoint | None = None

    def check(self, vocabulary: int, context: int) -> None:
        """Raise UsageError or ContextOverflow if it cannot be answered with this vocabulary and context."""
        if not self.prompt:
            raise UsageError("The prompt has no tokens; a model needs at least one to go on from.")
        for token in self.prompt:
            if not 0 <= token < vocabulary:
                raise UsageError(f"The prompt holds token {token}; the vocabulary is 0 .. {vocabulary - 1}.")
        if len(self.prompt) >= context:
            raise ContextOverflow(
                f"The prompt has {len(self.prompt)} tokens and the context {context}, which leaves no room for an "
                f"answer; shorten the prompt or ask for a larger context."
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if not all(self.stop):
            raise UsageError("A stop string is empty; it would end every answer at once.")
        self.sampling.check_vocabulary(vocabulary)
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        resumed = 0
        if self.resume is not None:
            resumed = len(self.resume.tokens)
            if resumed >= len(self.prompt) or self.prompt[:resumed] != self.resume.tokens:
                raise UsageError(
                    f"The checkpoint of {resumed} tokens is not a beginning of the prompt of {len(self.prompt)} tokens "
                    f"that leaves at least one token to run."
                )
        if self.checkpoint is not None and not resumed < self.checkpoint <= len(self.prompt):
            raise UsageError(
                f"checkpoint is {self.checkpoint}; it must lie after the {resumed} resumed tokens and within the "
                f"prompt of {len(self.prompt)}."
            )


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request: a token, a checkpoint taken, or an end by an error.

    The last event of a request has a `finish_reason` and its `stats`. `stop` is the stop string that was found.
    """

    request: int
    token: int | None = None
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: EndReason | None = None
    stop: str | None = None
    checkpoint: Checkpoint | None = None
    error: Exception | None = None
    stats: RequestStats | None = None
