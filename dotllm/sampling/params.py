"""What a caller may ask of the sampler, checked once, at the door."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from dotllm.errors import UsageError

__all__ = ["RANDOM_SEED", "SamplingParams"]

RANDOM_SEED = -1
"""Asks for a seed to be drawn; `SamplingParams.seed` then holds the drawn one, so that a run can be repeated."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The distribution the next token is drawn from, and the seed it is drawn with; the default is greedy.

    `top_k` 0, `top_p` 1, `min_p` 0, `repeat_penalty` 1 and the other penalties 0 are off. `repeat_last_n` counts the
    latest tokens, prompt included, that penalties look at: -1 is all of them, 0 none. `logit_bias` is added to the
    logit of a token id; -inf forbids it. `top_logprobs` None reports no log probabilities, 0 those of the chosen token
    alone. Raises UsageError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = RANDOM_SEED
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        infinity = math.inf
        _real("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, 1 << 31)
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repeat_penalty", self.repeat_penalty, 1e-6, 1e6)
        _whole("repeat_last_n", self.repeat_last_n, -1, 1 << 31)
        _real("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _real("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        for token, bias in self.logit_bias.items():
            _whole("a token id in logit_bias", token, 0, 1 << 31)
            if bias != -infinity:
                _real(f"the logit_bias of token {token}", bias, -1e6, 1e6)
        _whole("seed", self.seed, RANDOM_SEED, (1 << 64) - 1)
        if self.top_logprobs is not None:
            _whole("top_logprobs", self.top_logprobs, 0, 1 << 31)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed == RANDOM_SEED:
            object.__setattr__(self, "seed", secrets.randbits(32))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Does the history of a sequence bear on its next token's distribution?"""
        on = self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return on and self.repeat_last_n != 0

    def check_vocabulary(self, size: int) -> None:
        """Raise UsageError if a token id in `logit_bias` is not below `size`."""
        for token in self.logit_bias:
            if token >= size:
                raise UsageError(f"logit_bias names token {token}, but the vocabulary ends at {size - 1}.")


def _real(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; it must be a whole number from {low} to {high}.")
