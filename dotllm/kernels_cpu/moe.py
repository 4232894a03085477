"""Mixture of experts: the router's choice, and the weighted sum over experts.

p = softmax(logits);  the `used` largest, ties to the lowest id;  weight = p / max(sum of the chosen, 2^-14) * scale
out = sum over ranks, in order, of weight_r * y_r

logits (M, X), flat     ids, weights (M, used), flat, highest first     y (M, used, E), flat
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dotllm.kernels_cpu.lanes import (
    div,
    div16,
    fma,
    fma16,
    load16,
    max16,
    maximum,
    peak16,
    splat16,
    store16,
    sum16,
    zero16,
)
from dotllm.kernels_cpu.mathfun import exp

__all__ = ["route_part", "sum_experts_part"]

LEAST = 6.103515625e-05


@njit(cache=True)
def _softmax(x: Any, at: int, size: int, out: Any) -> None:
    # out (>= X,)
    whole = size - size % 16
    peak = x[at]
    if whole > 0:
        lanes = load16(x, at)
        for i in range(16, whole, 16):
            lanes = max16(lanes, load16(x, at + i))
        peak = peak16(lanes)
    for i in range(whole, size):
        peak = maximum(peak, x[at + i])
    sums = zero16()
    for i in range(0, whole, 16):
        e = exp(load16(x, at + i) - splat16(peak))
        store16(out, i, e)
        sums = sums + e
    total = sum16(sums)
    for i in range(whole, size):
        out[i] = exp(x[at + i] - peak)
        total = total + out[i]
    for i in range(0, whole, 16):
        store16(out, i, div16(load16(out, i), splat16(total)))
    for i in range(whole, size):
        out[i] = div(out[i], total)


@njit(cache=True)
def route_part(
    logits: Any, experts: int, used: int, scale: float, scratch: Any, ids: Any, weights: Any,
    thread: int, n_threads: int,
) -> None:  # fmt: skip
    # logits (M * X,), scratch (n_threads * X,), ids, weights (M * used,)
    rows = logits.size // experts
    p = scratch[thread * experts : (thread + 1) * experts]
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        _softmax(logits, row * experts, experts, p)
        total = np.float32(0.0)
        for rank in range(used):
            best = 0
            for e in range(1, experts):
                if p[e] > p[best]:
                    best = e
            ids[row * used + rank] = best
            weights[row * used + rank] = p[best]
            total = total + p[best]
            p[best] = np.float32(-1.0)
        total = maximum(total, np.float32(LEAST))
        for rank in range(used):
            weights[row * used + rank] = div(weights[row * used + rank], total) * np.float32(scale)


@njit(cache=True)
def sum_experts_part(y: Any, weights: Any, used: int, size: int, out: Any, thread: int, n_threads: int) -> None:
    # y (M * used * E,), weights (M * used,), out (M * E,)
    whole = size - size % 16
    rows = out.size // size
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        for i in range(0, whole, 16):
            total = zero16()
            for at in range(row * used, (row + 1) * used):
                total = fma16(splat16(weights[at]), load16(y, at * size + i), total)
            store16(out, row * size + i, load16(out, row * size + i) + total)
        for i in range(whole, size):
            value = np.float32(0.0)
            for at in range(row * used, (row + 1) * used):
                value = fma(weights[at], y[at * size + i], value)
            out[row * size + i] = out[row * size + i] + value
