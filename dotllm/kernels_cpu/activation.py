"""Element-wise functions between two matrices.

gate_up     out = act(gate) * up, act = silu or gelu_half            gates        g = a * softplus(alpha + dt)
gated_add   out += sigmoid(gate) * x, one gate a row                              b = sigmoid(beta)
softcap     x = cap * tanh(x / cap)

flat arrays, sixteen values at a time; what is left over at the end goes value by value with the same functions
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dotllm.kernels_cpu.lanes import div, div16, fma, fma16, load16, splat16, store16
from dotllm.kernels_cpu.mathfun import gelu_half, sigmoid, silu, softplus, tanh

__all__ = ["gate_up_part", "gated_add_part", "gates_part", "softcap_part"]


@njit(cache=True)
def gate_up_part(gate: Any, up: Any, out: Any, use_gelu: bool, thread: int, n_threads: int) -> None:
    # gate, up, out (M * F,)
    blocks = gate.size // 16
    for i in range(16 * (blocks * thread // n_threads), 16 * (blocks * (thread + 1) // n_threads), 16):
        y = load16(gate, i)
        y = gelu_half(y) if use_gelu else silu(y)
        store16(out, i, y * load16(up, i))
    if thread == n_threads - 1:
        for i in range(16 * blocks, gate.size):
            x = gate[i]
            x = gelu_half(x) if use_gelu else silu(x)
            out[i] = x * up[i]


@njit(cache=True)
def gates_part(
    alpha: Any, beta: Any, a: Any, dt: Any, g: Any, b: Any, thread: int, n_threads: int
) -> None:  # fmt: skip
    # alpha, beta, g, b (M * HV,), a and dt (HV,)
    heads = a.size
    whole = heads - heads % 16
    rows = alpha.size // heads
    for row in range(rows * thread // n_threads, rows * (thread + 1) // n_threads):
        at = row * heads
        for h in range(0, whole, 16):
            store16(g, at + h, load16(a, h) * softplus(load16(alpha, at + h) + load16(dt, h)))
            store16(b, at + h, sigmoid(load16(beta, at + h)))
        for h in range(whole, heads):
            g[at + h] = a[h] * softplus(alpha[at + h] + dt[h])
            b[at + h] = sigmoid(beta[at + h])


@njit(cache=True)
def gated_add_part(x: Any, gate: Any, out: Any, thread: int, n_threads: int) -> None:
    # x, out (M * E,), gate (M,)
    size = x.size // gate.size
    whole = size - size % 16
    for row in range(gate.size * thread // n_threads, gate.size * (thread + 1) // n_threads):
        at = row * size
        share = sigmoid(gate[row])
        shares = splat16(share)
        for i in range(at, at + whole, 16):
            store16(out, i, fma16(shares, load16(x, i), load16(out, i)))
        for i in range(at + whole, at + size):
            out[i] = fma(share, x[i], out[i])


@njit(cache=True)
def softcap_part(x: Any, cap: float, thread: int, n_threads: int) -> None:
    # x (M * N,)
    limit = np.float32(cap)
    limits = splat16(limit)
    blocks = x.size // 16
    for i in range(16 * (blocks * thread // n_threads), 16 * (blocks * (thread + 1) // n_threads), 16):
        store16(x, i, limits * tanh(div16(load16(x, i), limits)))
    if thread == n_threads - 1:
        for i in range(16 * blocks, x.size):
            x[i] = limit * tanh(div(x[i], limit))
