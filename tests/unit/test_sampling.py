"""The chain against its definition, and its draws against its own distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dotllm.errors import DotLLMError, UsageError
from dotllm.sampling.chain import SamplerChain, log_softmax, most_likely
from dotllm.sampling.params import RANDOM_SEED, SamplingParams

RNG = np.random.default_rng(0)
LOGITS = (RNG.standard_normal(60) * 2.0).astype(np.float32)
HISTORY = [3, 3, 3, 17, 40, 41, 3, 59]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def naive(params: SamplingParams, logits: np.ndarray, history: list[int]) -> np.ndarray:
    """The whole chain, step by step over the whole vocabulary, in float64: probabilities (V,)."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    window = history if params.repeat_last_n < 0 else history[len(history) - min(params.repeat_last_n, len(history)) :]
    for token in set(window):
        x[token] = x[token] / params.repeat_penalty if x[token] > 0 else x[token] * params.repeat_penalty
        x[token] -= window.count(token) * params.frequency_penalty + params.presence_penalty
    alive = list(range(len(x)))
    alive.sort(key=lambda i: (-x[i], i))
    if params.top_k:
        alive = alive[: params.top_k]
    total, kept = 0.0, []
    for i, p in zip(alive, softmax(x[alive]), strict=True):
        kept.append(i)
        total += p
        if total >= params.top_p:
            break
    if params.min_p:
        kept = [i for i in kept if x[i] >= x[kept[0]] + math.log(params.min_p)]
    out = np.zeros(len(x))
    out[kept] = softmax(x[kept] / params.temperature)
    return out


CASES = {
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "hot": SamplingParams(temperature=1.8, seed=1),
    "top-k": SamplingParams(temperature=1.0, top_k=5, seed=2),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    "min-p": SamplingParams(temperature=1.1, min_p=0.1, seed=4),
    "repeat": SamplingParams(temperature=1.0, repeat_penalty=1.7, seed=5),
    "repeat window": SamplingParams(temperature=1.0, repeat_penalty=1.7, repeat_last_n=3, seed=5),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.5, repeat_last_n=-1, seed=6),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.6, seed=7),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 2.0, 9: -math.inf}, seed=8),
    "all": SamplingParams(
        temperature=0.8, top_k=30, top_p=0.95, min_p=0.02, repeat_penalty=1.1, presence_penalty=0.3, seed=9
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_candidates_are_the_chain_step_by_step(name: str) -> None:
    expected = naive(CASES[name], LOGITS, HISTORY)
    ids, logprobs = SamplerChain(CASES[name]).candidates(LOGITS, HISTORY)
    assert ids.tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(np.exp(logprobs), expected[ids], rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_distribution_of_the_chain(name: str) -> None:
    draws = 20_000
    chain = SamplerChain(CASES[name])
    counts = np.zeros(len(LOGITS))
    for position in range(draws):
        counts[chain.sample(LOGITS, position, HISTORY).token] += 1
    expected = naive(CASES[name], LOGITS, HISTORY) * draws
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    if expected[rare].sum() < 5:
        seen, wanted = seen[:-1], wanted[:-1]
    chi, degrees = float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1
    assert chi < degrees + 4.0 * math.sqrt(2.0 * degrees) + 6.0


def test_seeds_draw_independently() -> None:
    """The first token over many seeds follows the distribution too."""
    counts = np.zeros(len(LOGITS))
    for seed in range(5000):
        counts[SamplerChain(SamplingParams(temperature=1.0, top_k=5, seed=seed)).sample(LOGITS, 11, []).token] += 1
    expected = naive(SamplingParams(temperature=1.0, top_k=5, seed=0), LOGITS, []) * 5000
    kept = expected > 0
    assert float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()) < 20.0


def test_same_seed_and_position_draw_the_same_token() -> None:
    params = SamplingParams(temperature=1.0, seed=12)
    draws = [[SamplerChain(params).sample(LOGITS, p, HISTORY).token for p in range(50)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 5


def test_truncation_keeps_the_noise_of_the_survivors() -> None:
    """A token that wins over the whole vocabulary also wins among any survivors it belongs to."""
    wide, narrow = SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=1.0, top_k=10, seed=3)
    kept = set(most_likely(LOGITS, 10))
    same = 0
    for position in range(300):
        a = SamplerChain(wide).sample(LOGITS, position, []).token
        b = SamplerChain(narrow).sample(LOGITS, position, []).token
        assert a == b or a not in kept
        same += a == b
    assert same > 150


def test_greedy_takes_the_largest_after_bias_and_penalties_and_the_lowest_id_on_ties() -> None:
    flat = np.zeros(8, np.float32)
    flat[[2, 5]] = 1.0
    assert SamplerChain(SamplingParams()).sample(flat, 0, []).token == 2
    assert SamplerChain(SamplingParams(repeat_penalty=1.5)).sample(flat, 0, [2]).token == 5
    assert SamplerChain(SamplingParams(logit_bias={7: 3.0})).sample(flat, 0, []).token == 7
    assert flat[7] == 0.0  # the model's row is never written
    ids, logprobs = SamplerChain(SamplingParams(top_k=3)).candidates(flat, [])
    assert ids.tolist() == [2]
    assert logprobs.tolist() == [0.0]


def test_ties_at_the_borders_of_top_k_go_to_the_lowest_ids() -> None:
    flat = np.zeros(100, np.float32)
    flat[50] = 1.0
    assert SamplerChain(SamplingParams(temperature=1.0, top_k=4)).candidates(flat, [])[0].tolist() == [0, 1, 2, 50]
    assert most_likely(flat, 3) == [50, 0, 1]


@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.9, 0.999, 1.0 - 2.0**-53])
def test_top_p_on_a_large_vocabulary_equals_sorting_everything(top_p: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(20_000) * 3.0).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    order = np.argsort(-logits, kind="stable")
    reached = np.cumsum(softmax(logits[order].astype(np.float64)))
    count = min(int(np.searchsorted(reached, top_p)) + 1, len(order))
    found = len(SamplerChain(params).candidates(logits, [])[0])
    assert abs(found - count) <= (1 if top_p < 0.9999 else 20_000 * 0.02)


def test_log_probabilities_are_the_models_own() -> None:
    params = SamplingParams(temperature=2.0, top_k=1, logit_bias={4: 50.0}, top_logprobs=3)
    sampled = SamplerChain(params).sample(LOGITS, 0, [])
    own = log_softmax(LOGITS.astype(np.float64))
    assert sampled.token == 4
    assert sampled.logprob == pytest.approx(own[4])
    assert [i for i, _ in sampled.top] == np.argsort(-LOGITS)[:3].tolist()
    assert [p for _, p in sampled.top] == pytest.approx(np.sort(own)[::-1][:3].tolist())


def test_tiny_temperature_is_greedy_and_extremes_do_not_warn() -> None:
    chain = SamplerChain(SamplingParams(temperature=1e-300, seed=0))
    assert chain.sample(LOGITS, 0, []).token == int(LOGITS.argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_raise(bad: float, temperature: float) -> None:
    logits = LOGITS.copy()
    logits[7] = bad
    with pytest.raises(DotLLMError, match="finite"):
        SamplerChain(SamplingParams(temperature=temperature)).sample(logits, 0, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_raises(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(60), -math.inf))
    with pytest.raises(DotLLMError, match="forbidden"):
        SamplerChain(params).sample(LOGITS, 0, [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("repeat_penalty", 0.0),
        ("repeat_last_n", -2),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", True),
        ("top_logprobs", -1),
    ],
)
def test_values_outside_their_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_random_seed_is_drawn_once_and_told() -> None:
    seeds = {SamplingParams(seed=RANDOM_SEED).seed for _ in range(20)}
    assert len(seeds) > 15
    assert min(seeds) >= 0
    assert SamplingParams(seed=0).seed == 0


def test_bias_beyond_the_vocabulary_is_refused() -> None:
    SamplingParams(logit_bias={9: 1.0}).check_vocabulary(10)
    with pytest.raises(UsageError, match="token 10"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
