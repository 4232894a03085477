"""Gumbel noise as a pure function of (seed, position, token id): the reason why drafts cannot change the words.

argmax over ids of (log probability + Gumbel noise) is a draw from the distribution. Because the noise hangs on nothing
but seed, position and id, a token is the same whether it was drawn alone, in a block of drafts or in any batch; and a
drafter that uses the same noise guesses the same token as often as its distribution allows.

    key     = mix(seed)                            one 64-bit word a request
    stream  = mix(key + (position + 1) * ODD)      one word a position
    hash    = mix(stream + (id + 1) * ODD)         one word an id: SplitMix64, started at `stream`
    u       = ((hash >> 11) + 1/2) / 2^53          never 0 and never 1
    noise   = -log(-log(u))

The integer part is the same on every machine. The logarithm is the platform's, good to about one unit in the last of 53
bits, so two machines can part only where the two best scores of a draw agree to some 15 digits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw", "gumbel", "uniform"]

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive counters land far apart
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_REACH = 8.0  # scores this far below the peak need noise that one id in 3,000 has
_TILE = 8192  # ids hashed at a time, so that the words stay in cache


def gumbel(seed: int, position: int, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """Standard Gumbel noise of each token id (n,) at an absolute position of the request with this seed."""
    noise = uniform(seed, position, ids)
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def draw(seed: int, position: int, ids: NDArray[np.integer], scores: NDArray[np.float64]) -> int:
    """The index i that maximises scores[i] + gumbel(ids[i]); scores (n,) are log probabilities up to a constant.

    The logarithms are what costs on a whole vocabulary. So the likely ids come first, and of the others only those
    whose uniform number is large enough to beat the best of them.
    """
    peak = float(scores.max())
    near = np.flatnonzero(scores >= peak - _REACH)
    best = near[int((reached := scores[near] + gumbel(seed, position, ids[near])).argmax())]
    if len(near) == len(ids):
        return int(best)
    bar = math.exp(-math.exp(peak - _REACH - float(reached.max()))) - 1e-12  # smaller noise cannot win; 1e-12: rounding
    lucky = [
        np.flatnonzero(uniform(seed, position, ids[start : start + _TILE]) > bar) + start
        for start in range(0, len(ids), _TILE)
    ]
    chosen = np.union1d(np.concatenate(lucky), [best])
    return int(chosen[(scores[chosen] + gumbel(seed, position, ids[chosen])).argmax()])


def uniform(seed: int, position: int, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """The uniform numbers, strictly between 0 and 1, that `gumbel` is made of."""
    stream = _mix(_mix(seed & _MASK) + (position + 1) * _ODD & _MASK)
    x = ids.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_ODD)
    x += np.uint64(stream)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX2)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(11)
    u = x.astype(np.float64)
    u += 0.5
    u *= 2.0**-53
    return u


def _mix(x: int) -> int:
    """SplitMix64's finaliser on one word, in Python integers: NumPy warns when a scalar wraps."""
    x = (x ^ x >> 30) * _MIX1 & _MASK
    x = (x ^ x >> 27) * _MIX2 & _MASK
    return x ^ x >> 31
