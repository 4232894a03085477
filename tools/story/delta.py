"""The gated delta rule twice: token by token (the definition), and chunk by chunk (fast enough to train).

For each token, with state S (Dk, Dv), log decay g <= 0 and write strength beta:
    S = S exp(g);   S = S + k (beta (v - S^T k))^T;   o = S^T q
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["delta_chunked", "delta_recurrent"]


def delta_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs (B, H, T, Dv); q, k (B, H, T, Dk), v (B, H, T, Dv), g and beta (B, H, T)."""
    b, h, t, d = q.shape
    state = torch.zeros(b, h, d, v.shape[-1])
    out = []
    for i in range(t):
        state = state * g[:, :, i, None, None].exp()
        error = v[:, :, i] - (state * k[:, :, i, :, None]).sum(-2)
        state = state + k[:, :, i, :, None] * (beta[:, :, i, None] * error)[..., None, :]
        out.append((state * q[:, :, i, :, None]).sum(-2))
    return torch.stack(out, 2)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for a strictly lower triangular A; its gradient is two matrix products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=torch.float32)
        inverse = torch.linalg.solve_triangular(a.float() + eye, eye.expand(a.shape), upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2).to(gradient.dtype)
        return -(turned @ (gradient @ turned))


def delta_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int, product: torch.dtype) -> Tensor:
    """The same as `delta_recurrent`: products of matrices inside a chunk, a short loop over chunks; T % chunk == 0.

    `product` is the type in which matrices are multiplied.
    """
    b, h, t, d = q.shape
    n = t // chunk
    q, k, v = (x.reshape(b, h, n, chunk, -1) for x in (q, k, v))
    beta = beta.reshape(b, h, n, chunk, 1)
    total = g.reshape(b, h, n, chunk).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -1e9).exp()
    weighted = (k * beta).to(product)
    turned = k.to(product).transpose(-1, -2)
    inverse = UnitLowerInverse.apply(((weighted @ turned).float() * decay).tril(-1)).to(product)
    grown = total.exp()[..., None]
    new = inverse @ (v * beta).to(product)  # values to write, were the incoming state zero
    explained = inverse @ (weighted * grown).to(product)  # what the incoming state explains already
    within = ((q.to(product) @ turned).float() * decay).to(product)
    across = (q * grown).to(product)
    last = total[..., -1:]
    into = (k * (last - total).exp()[..., None]).to(product).transpose(-1, -2)
    carry = last.exp()[..., None]
    state = torch.zeros(b, h, d, v.shape[-1])
    out = []
    for i in range(n):
        before = state.to(product)
        write = new[:, :, i] - explained[:, :, i] @ before
        out.append(across[:, :, i] @ before + within[:, :, i] @ write)
        state = state * carry[:, :, i] + (into[:, :, i] @ write).float()
    return torch.stack(out, 2).reshape(b, h, t, -1).float()
