"""A small Qwen3.5-style hybrid in PyTorch: Gated DeltaNet and gated attention, with one MTP block.

Every convention is that of the GGUF architecture `qwen35`, so that an export is a plain copy of the parameters:
  * RMS norm weights multiply as they are, eps 1e-6;
  * value head j of a GDN layer uses key head j % key_heads;
  * the rows of attn_q are [query, gate] per head; rotary pairs are (j, j + n) in the first 2n values of a head;
  * q and k of GDN are l2-normalised after convolution and SiLU, q is scaled by 1 / sqrt(width);
  * at position j the MTP block sees the embedding of token j and the post-norm hidden state of position j - 1 (zeros
    for j = 0), and predicts token j + 1 through its own norm and the shared output head.
Shapes: B sequences, T tokens, H heads, D head width, E embedding width.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from .delta import delta_chunked, delta_recurrent

__all__ = ["EPS", "Config", "GatedAttention", "GatedDeltaNet", "StoryModel", "losses"]

EPS = 1e-6
Pair = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model; the defaults are those of the bundled file (5.3 M parameters)."""

    vocab: int = 4096
    dim: int = 256
    layers: int = 8
    interval: int = 4  # every 4th layer is attention, the others are Gated DeltaNet
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: int = 32
    theta: float = 10000.0
    key_heads: int = 2
    value_heads: int = 4
    gdn_dim: int = 64
    conv: int = 4
    context: int = 2048
    chunk: int = 64

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.gdn_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.gdn_dim

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


def l2(x: Tensor) -> Tensor:
    """x / |x| over the last axis."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


class GatedDeltaNet(nn.Module):
    """(B, T, E) -> (B, T, E) through a recurrent state per head instead of a cache."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        width = 2 * c.key_dim + c.value_dim
        self.qkv = linear(c.dim, width)
        self.gate = linear(c.dim, c.value_dim)
        self.alpha = linear(c.dim, c.value_heads)
        self.beta = linear(c.dim, c.value_heads)
        self.conv = nn.Parameter(torch.randn(width, c.conv) * 0.1)
        self.a_log = nn.Parameter(torch.linspace(1.0, 8.0, c.value_heads).log())
        step = torch.logspace(-3, -1, c.value_heads)  # initial step sizes: from long memory to short
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = RMSNorm(c.gdn_dim)
        self.out = linear(c.value_dim, c.dim)
        with torch.no_grad():
            self.conv[:, -1] += 0.7  # start close to "no convolution"

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution over time, SiLU, norms: q, k, v (B, H, T, D), key heads repeated to value heads."""
        c, (b, t, _) = self.c, x.shape
        raw = functional.pad(self.qkv(x).float(), (0, 0, c.conv - 1, 0))
        mixed = torch.stack([raw[:, i : i + t] * self.conv[:, i] for i in range(c.conv)]).sum(0)
        q, k, v = functional.silu(mixed).split([c.key_dim, c.key_dim, c.value_dim], -1)
        repeat = c.value_heads // c.key_heads
        q = (l2(q.view(b, t, c.key_heads, -1)) * c.gdn_dim**-0.5).transpose(1, 2).repeat(1, repeat, 1, 1)
        k = l2(k.view(b, t, c.key_heads, -1)).transpose(1, 2).repeat(1, repeat, 1, 1)
        return q, k, v.view(b, t, c.value_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        c, (b, t, _) = self.c, x.shape
        q, k, v = self._qkv(x)
        g = (-self.a_log.exp() * functional.softplus(self.alpha(x).float() + self.dt_bias)).transpose(1, 2)
        beta = torch.sigmoid(self.beta(x).float()).transpose(1, 2)
        if t % c.chunk:
            o = delta_recurrent(q, k, v, g, beta)
        else:
            product = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
            o = delta_chunked(q, k, v, g, beta, c.chunk, product)
        z = self.gate(x).float().view(b, t, c.value_heads, -1)
        o = self.norm(o.transpose(1, 2)) * functional.silu(z)
        return self.out(o.reshape(b, t, -1))  # type: ignore[no-any-return]


def rotary_table(c: Config, length: int) -> Pair:
    frequency = c.theta ** (-torch.arange(0, c.rotary, 2).float() / c.rotary)
    angle = torch.arange(length).float()[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: Pair) -> Tensor:
    cos, sin = table
    n = cos.shape[-1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class GatedAttention(nn.Module):
    """(B, T, E) -> (B, T, E) and the keys and values: causal attention, each head gated by a sigmoid."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q = linear(c.dim, c.heads * c.head_dim * 2)
        self.k = linear(c.dim, c.kv_heads * c.head_dim)
        self.v = linear(c.dim, c.kv_heads * c.head_dim)
        self.q_norm = RMSNorm(c.head_dim)
        self.k_norm = RMSNorm(c.head_dim)
        self.out = linear(c.heads * c.head_dim, c.dim)

    def forward(self, x: Tensor, table: Pair, earlier: Pair | None = None) -> tuple[Tensor, Pair]:
        """`earlier`: keys and values of the first MTP pass; position j then sees theirs below j, and its own."""
        c, (b, t, _) = self.c, x.shape
        q, gate = self.q(x).view(b, t, c.heads, 2, c.head_dim).unbind(3)
        k = self.k(x).view(b, t, c.kv_heads, c.head_dim)
        v = self.v(x).view(b, t, c.kv_heads, c.head_dim).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), table).to(v.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), table).to(v.dtype)
        repeat = c.heads // c.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        k_seen, v_seen = earlier or (k, v)
        scores = (q @ k_seen.transpose(-1, -2)).float() * c.head_dim**-0.5
        if earlier:
            own = (q.float() * k.float()).sum(-1, keepdim=True) * c.head_dim**-0.5
            scores = torch.where(torch.eye(t, dtype=torch.bool), own, scores)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        p = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(future, 0.0)
        o = (p.to(v.dtype) @ v_seen).float()
        if earlier:
            o = o + p.diagonal(dim1=-2, dim2=-1)[..., None] * (v - v_seen).float()
        o = (o / p.sum(-1, keepdim=True)).transpose(1, 2) * torch.sigmoid(gate.float())
        return self.out(o.reshape(b, t, -1)), (k, v)


class Block(nn.Module):
    """Mixer (attention or GDN) and a gated feed-forward network, each behind a norm and added to the residual."""

    def __init__(self, c: Config, attention: bool) -> None:
        super().__init__()
        self.attention = attention
        self.attn_norm = RMSNorm(c.dim)
        self.mix = GatedAttention(c) if attention else GatedDeltaNet(c)
        self.ffn_norm = RMSNorm(c.dim)
        self.ffn_gate = linear(c.dim, c.ffn)
        self.ffn_up = linear(c.dim, c.ffn)
        self.ffn_down = linear(c.ffn, c.dim)

    def forward(self, x: Tensor, table: Pair, earlier: Pair | None = None) -> tuple[Tensor, Pair | None]:
        kv = None
        if self.attention:
            y, kv = self.mix(self.attn_norm(x), table, earlier)
        else:
            y = self.mix(self.attn_norm(x))
        x = x + y.float()
        y = self.ffn_norm(x)
        y = self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y))
        return x + y.float(), kv


class StoryModel(nn.Module):
    """The trunk and its MTP block; embedding and output head are one matrix."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c, c.is_attention(i)) for i in range(c.layers))
        self.norm = RMSNorm(c.dim)
        self.mtp = Block(c, attention=True)
        self.enorm, self.hnorm, self.mtp_norm = RMSNorm(c.dim), RMSNorm(c.dim), RMSNorm(c.dim)
        self.eh_proj = linear(2 * c.dim, c.dim)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.05)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
                if name.endswith(("mix.out", "ffn_down")):
                    nn.init.zeros_(module.weight)  # residual branches start silent

    def head(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed.weight)

    def hidden(self, ids: Tensor) -> Tensor:
        """Post-norm hidden states (B, T, E) of tokens (B, T)."""
        table = rotary_table(self.c, ids.shape[1])
        x = self.embed(ids)
        for block in self.blocks:
            x, _ = block(x, table)
        return self.norm(x)  # type: ignore[no-any-return]

    def mtp_hidden(self, ids: Tensor, previous: Tensor, earlier: Pair | None = None) -> tuple[Tensor, Pair]:
        """One MTP pass; previous[j] is the state of position j - 1, of the trunk or of the pass before."""
        pair = torch.cat([self.enorm(self.embed(ids)), self.hnorm(previous)], -1)
        x, kv = self.mtp(self.eh_proj(pair).float(), rotary_table(self.c, ids.shape[1]), earlier)
        return self.mtp_norm(x), kv

    def forward(self, ids: Tensor) -> Pair:
        """Logits (B, T, vocab) of the trunk and of the first MTP pass."""
        hidden = self.hidden(ids)
        return self.head(hidden), self.head(self.mtp_hidden(ids, shift(hidden))[0])


def shift(hidden: Tensor) -> Tensor:
    """Row j becomes row j - 1; row 0 becomes zeros."""
    return functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def losses(model: StoryModel, ids: Tensor, depth: int, distil: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of the trunk and of `depth` MTP passes on ids (B, T + 1); and how often each pass agrees with the trunk.

    Each pass drafts one token further. With `distil` it learns the trunk's distribution, which is what decides whether
    a draft is accepted; else the token of the text.
    """
    x, y = ids[:, :-1], ids[:, 1:]
    hidden = model.hidden(x)
    logits = model.head(hidden).float()
    found, agreed = [functional.cross_entropy(logits.flatten(0, 1), y.flatten())], []
    target = logits.detach().softmax(-1)
    state, first = hidden, None
    for d in range(1, depth + 1):
        out, kv = model.mtp_hidden(x, shift(state), first)
        z = model.head(out).float()
        if distil:
            loss = -(target * z.log_softmax(-1)).sum(-1)
        else:
            loss = functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        found.append(loss[:, d:].mean())
        agreed.append((z.argmax(-1) == logits.argmax(-1))[:, d:].float().mean())
        state, first = out, first or kv
    return found, agreed
