"""From one row of logits to one token.

    logits (V,) -> logit bias -> penalties -> top-k -> top-p -> min-p -> temperature -> argmax(log p + Gumbel noise)

the order that llama.cpp uses. Noise is computed for the survivors alone. Everything here is a pure function of
(parameters, logits, position, history), so a verify pass can call it row by row and throw the result away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dotllm.errors import DotLLMError
from dotllm.sampling.noise import draw
from dotllm.sampling.params import SamplingParams

__all__ = ["Sampled", "SamplerChain", "log_softmax", "most_likely"]

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token. Log probabilities are the model's own (before bias, penalties, truncation, temperature)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplerChain:
    """The distribution of the next token under `params`, and the draw from it."""

    __slots__ = ("_bias", "_biased", "params")

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._biased = np.fromiter(params.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)

    def candidates(self, logits: Logits, history: Sequence[int]) -> tuple[Ids, NDArray[np.float64]]:
        """Ids (n,) that survive the chain, ascending, and their log probabilities (n,), which sum to 1 as p.

        `logits` (V,) are the model's; `history` is every token before this one, prompt included. Raises DotLLMError
        if the logits are not numbers or nothing survives.
        """
        ids, scores = self._survivors(self._shifted(logits, history))
        return ids, log_softmax(scores)

    def sample(self, logits: Logits, position: int, history: Sequence[int]) -> Sampled:
        """Draw the token at absolute `position` of the sequence; greedy picks the largest, ties to the lowest id."""
        shifted = self._shifted(logits, history)
        if self.params.greedy:
            _check(float(shifted[(best := int(shifted.argmax()))]))
            token = best
        else:
            ids, scores = self._survivors(shifted)
            token = int(ids[draw(self.params.seed, position, ids, scores)])
        if self.params.top_logprobs is None:
            return Sampled(token)
        logprobs = log_softmax(logits.astype(np.float64))
        top = most_likely(logits, self.params.top_logprobs)
        return Sampled(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in top))

    def _shifted(self, logits: Logits, history: Sequence[int]) -> Logits:
        """Logits after bias and penalties; the row itself, untouched, if there are none."""
        p = self.params
        if not len(self._biased) and not p.penalised:
            return logits
        shifted = logits.copy()
        shifted[self._biased] += self._bias
        window = history if p.repeat_last_n < 0 else history[-p.repeat_last_n :]
        if not p.penalised or not len(window):
            return shifted
        ids, counts = np.unique(np.asarray(window, np.int64), return_counts=True)
        seen = shifted[ids]
        repeat = np.float32(p.repeat_penalty)
        seen = np.where(seen > 0, seen / repeat, seen * repeat)
        seen -= counts.astype(np.float32) * np.float32(p.frequency_penalty) + np.float32(p.presence_penalty)
        shifted[ids] = seen
        return shifted

    def _survivors(self, logits: Logits) -> tuple[Ids, NDArray[np.float64]]:
        """Ids left by top-k, top-p, min-p, ascending, and their logits over the temperature."""
        p = self.params
        peak = float(logits.max())
        _check(peak)
        if p.greedy:
            return np.array([logits.argmax()]), np.zeros(1)
        if 0 < p.top_k < len(logits):
            ids = _largest(logits, p.top_k)
            ids = ids[logits[ids] > -math.inf]
        else:
            ids = np.flatnonzero(logits > -math.inf)
        scores = logits[ids].astype(np.float64) - peak
        if p.top_p < 1.0:
            kept = _nucleus(scores, p.top_p)
            ids, scores = ids[kept], scores[kept]
        if p.min_p > 0.0:
            kept = np.flatnonzero(scores >= math.log(p.min_p))
            ids, scores = ids[kept], scores[kept]
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf, as it should
            return ids, scores / p.temperature


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x - log(sum(exp(x))), (n,)."""
    peak = x.max()
    normal: NDArray[np.float64] = x - (peak + math.log(np.exp(x - peak).sum()))
    return normal


def most_likely(logits: Logits, count: int) -> list[int]:
    """The `count` ids with the largest logits, largest first, ties to the lowest id."""
    if count == 0:
        return []
    ids = _largest(logits, count) if count < len(logits) else np.arange(len(logits))
    ordered: list[int] = ids[np.argsort(-logits[ids], kind="stable")].tolist()
    return ordered


def _largest(x: Logits, count: int) -> Ids:
    """Ids, ascending, of the `count` (0 < count < n) largest; of equal ones at the border the lowest ids are taken."""
    border = np.partition(x, len(x) - count)[len(x) - count]
    above = np.flatnonzero(x > border)
    equal = np.flatnonzero(x == border)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(scores: NDArray[np.float64], top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest probabilities that sum to at least top_p; scores (n,), the peak is 0.

    n values below (1 - top_p) / n cannot sum to 1 - top_p, so the nucleus lies among the others: on a large vocabulary
    a few thousand are sorted in place of all. Half of that border, for rounding.
    """
    weights = np.exp(scores)
    total = float(weights.sum())
    near = np.flatnonzero(weights >= 0.5 * (1.0 - top_p) / len(weights) * total)
    order = near[np.argsort(-scores[near], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), top_p * total)) + 1
    return np.sort(order[:count])


def _check(peak: float) -> None:
    if math.isnan(peak) or peak == math.inf:
        raise DotLLMError("The model produced logits that are not finite numbers; the file may be damaged.")
    if peak == -math.inf:
        raise DotLLMError("Every token is forbidden here: logit_bias or a constraint leaves nothing to choose from.")
