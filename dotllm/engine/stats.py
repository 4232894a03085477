"""Where the time went, per request and in all."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["EngineStats", "Meter", "RequestStats"]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request, until now; milliseconds of the wall clock.

    The step that ends the prompt also gives the first token: it counts as prefill, and `decode_tokens` are the others.
    Sampling is a part of prefill and decode. Steps that are shared with other requests count in full for each.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    prefill_ms: float
    decode_ms: float
    sampling_ms: float
    first_token_ms: float
    total_ms: float

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that were computed, not taken from a checkpoint."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def decode_tokens(self) -> int:
        return max(0, self.generated_tokens - 1)

    @property
    def prefill_rate(self) -> float:
        """Tokens a second."""
        return _rate(self.prefill_tokens, self.prefill_ms)

    @property
    def decode_rate(self) -> float:
        """Tokens a second."""
        return _rate(self.decode_tokens, self.decode_ms)


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    steps: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0


@dataclass(slots=True)
class Meter:
    """The stopwatch of one request."""

    submitted: float = field(default_factory=time.perf_counter)
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill: float = 0.0
    decode: float = 0.0
    sampling: float = 0.0
    first_token: float = 0.0

    def step(self, seconds: float, *, decoding: bool) -> None:
        """A step that this request took part in."""
        if decoding:
            self.decode += seconds
        else:
            self.prefill += seconds

    def tokens(self, drafted: int, accepted: int) -> None:
        """A block was verified."""
        self.drafted += drafted
        self.accepted += accepted
        if not self.first_token:
            self.first_token = time.perf_counter() - self.submitted

    def read(self, prompt_tokens: int, generated_tokens: int) -> RequestStats:
        return RequestStats(
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached,
            generated_tokens=generated_tokens,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            prefill_ms=1e3 * self.prefill,
            decode_ms=1e3 * self.decode,
            sampling_ms=1e3 * self.sampling,
            first_token_ms=1e3 * self.first_token,
            total_ms=1e3 * (time.perf_counter() - self.submitted),
        )


def _rate(tokens: int, milliseconds: float) -> float:
    return 1e3 * tokens / milliseconds if milliseconds > 0 else 0.0
