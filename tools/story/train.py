"""Training: next-token loss plus MTP losses; Muon for the matrices of the blocks, AdamW for the rest.

The schedule follows the clock (or a number of steps), so that a run ends on time on a busy machine. From `DEEP_FROM`
on, windows are longer, a second MTP pass is chained to the first, and both learn the trunk's own distribution.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .model import StoryModel, losses

__all__ = ["Plan", "Streams", "train"]

TOKENS = 4096
"""Tokens a step."""
WINDOW, LONG_WINDOW = 256, 512
DEEP_FROM = 0.6
WARM_UP = 60
MUON_RATE, ADAM_RATE, DECAY, MOMENTUM = 0.02, 3e-3, 0.05, 0.95
MTP_WEIGHTS = (0.3, 0.15)
TALES = 0.75
"""Share of windows from the tales; the novels are longer, but have less of the language that we want."""
AT_A_BEGINNING = 0.2
"""Share of windows that begin where a document begins."""
REPORT_STEPS, VALIDATE_SECONDS = 20, 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train: `steps` if positive, else `minutes`. `product` is the type that matrices are multiplied in."""

    minutes: float
    steps: int
    compiled: bool
    product: torch.dtype

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", self.product, enabled=self.product != torch.float32)


class Streams:
    """Random windows from streams of token ids (uint16)."""

    def __init__(self, streams: dict[str, NDArray[np.uint16]], valid: NDArray[np.uint16], end: int, seed: int) -> None:
        self._random = np.random.default_rng(seed + 1)
        self._streams = {name: s for name, s in streams.items() if len(s) > LONG_WINDOW + 1}
        if not self._streams or len(valid) <= LONG_WINDOW + 1:
            raise SystemExit(f"too little text: training and held-out part each need {LONG_WINDOW + 2} tokens or more")
        self._valid = valid
        self._begins = {}
        for name, s in self._streams.items():
            begins = np.concatenate([[0], np.flatnonzero(s == end) + 1])
            self._begins[name] = begins[begins < len(s) - LONG_WINDOW - 1]

    def batch(self, window: int) -> Tensor:
        """(TOKENS // window, window + 1) ids."""
        rows = []
        names = list(self._streams)
        for _ in range(TOKENS // window):
            name = names[0] if len(names) == 1 or self._random.random() < TALES else names[1]
            s = self._streams[name]
            if self._random.random() < AT_A_BEGINNING:
                first = int(self._random.choice(self._begins[name]))
            else:
                first = int(self._random.integers(0, len(s) - window - 1))
            rows.append(s[first : first + window + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def held_out(self, windows: int = 64) -> Tensor:
        """The same windows every time, spread over the held-out stream."""
        firsts = np.linspace(0, len(self._valid) - LONG_WINDOW - 1, windows).astype(int)
        return torch.from_numpy(np.stack([self._valid[i : i + LONG_WINDOW + 1] for i in firsts]).astype(np.int64))


@torch.no_grad()
def orthogonalise(gradient: Tensor, product: torch.dtype, rounds: int = 5) -> Tensor:
    """Newton-Schulz iteration on a stack of matrices (n, rows, columns), rows <= columns: singular values near 1."""
    x = gradient.to(product)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        s = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.float()


class Muon:
    """Momentum, orthogonalised: the optimiser of Jordan et al. (2024), for matrices; equal shapes go in one stack."""

    def __init__(self, parameters: list[nn.Parameter], product: torch.dtype) -> None:
        self._product = product
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            self._groups.setdefault(tuple(p.shape), []).append(p)
        self._momentum = {shape: torch.zeros(len(ps), *shape) for shape, ps in self._groups.items()}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for shape, parameters in self._groups.items():
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            self._momentum[shape].lerp_(gradient, 1 - MOMENTUM)
            gradient = gradient.lerp(self._momentum[shape], MOMENTUM)
            tall = shape[0] > shape[1]
            update = orthogonalise(gradient.transpose(1, 2) if tall else gradient, self._product)
            rate = MUON_RATE * scale
            for p, u in zip(parameters, update.transpose(1, 2) if tall else update, strict=True):
                p.mul_(1 - rate * DECAY)
                p.add_(u, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)


class Optimiser:
    """Muon for the matrices inside blocks; AdamW for embeddings, norms, convolutions and gates."""

    def __init__(self, model: StoryModel, product: torch.dtype) -> None:
        def is_matrix(name: str, p: nn.Parameter) -> bool:
            return p.ndim == 2 and not any(part in name for part in ("embed", "conv", "alpha", "beta"))

        self._all = list(model.parameters())
        self._small = [p for n, p in model.named_parameters() if not is_matrix(n, p)]
        self._muon = Muon([p for n, p in model.named_parameters() if is_matrix(n, p)], product)
        self._adam = torch.optim.AdamW(
            self._small, lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True
        )

    def step(self, scale: float) -> None:
        nn.utils.clip_grad_norm_(self._small, 1.0)
        self._muon.step(scale)
        for group in self._adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self._adam.step()
        for p in self._all:
            p.grad = None


@torch.no_grad()
def validate(model: StoryModel, streams: Streams, plan: Plan) -> dict[str, float]:
    """Held-out loss and perplexity a token, and the share of positions where each MTP pass agrees with the trunk."""
    windows = streams.held_out()
    total = np.zeros(3)
    for part in windows.split(8):
        with plan.autocast():
            found, agreed = losses(model, part, depth=2, distil=False)
        total += np.array([float(x) for x in (found[0], *agreed)]) * len(part)
    loss, first, second = total / len(windows)
    return {
        "loss": round(loss, 4),
        "perplexity": round(math.exp(loss), 2),
        "mtp_1_agrees": round(first, 4),
        "mtp_2_agrees": round(second, 4),
    }


def train(model: StoryModel, streams: Streams, plan: Plan, log: Path, save: Callable[[], None]) -> None:
    """Train in place; a JSON line every 20 steps to `log`; `save` is called every five minutes and at the end."""

    def loss_of(ids: Tensor, deep: bool) -> tuple[Tensor, Tensor]:
        with plan.autocast():
            found, _ = losses(model, ids, depth=2 if deep else 1, distil=deep)
        return found[0], found[0] + sum(w * x for w, x in zip(MTP_WEIGHTS, found[1:], strict=False))

    step_loss = torch.compile(loss_of, dynamic=False) if plan.compiled else loss_of
    optimiser = Optimiser(model, plan.product)
    begin = time.monotonic()
    next_check, step, average = VALIDATE_SECONDS, 0, math.nan
    with log.open("a") as out:

        def say(**values: object) -> None:
            line = json.dumps({"step": step, "minutes": round((time.monotonic() - begin) / 60, 2), **values})
            print(line, flush=True)
            out.write(line + "\n")
            out.flush()

        while True:
            seconds = time.monotonic() - begin
            progress = step / plan.steps if plan.steps else seconds / (60 * plan.minutes)
            if progress >= 1:
                break
            deep = progress >= DEEP_FROM
            next_token, loss = step_loss(streams.batch(LONG_WINDOW if deep else WINDOW), deep)
            loss.backward()
            warm = min(1.0, (step + 1) / WARM_UP)
            optimiser.step(warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))))
            step += 1
            value = float(next_token.detach())
            average = value if math.isnan(average) else 0.95 * average + 0.05 * value
            if step % REPORT_STEPS == 0:
                say(loss=round(average, 4))
            if seconds >= next_check:
                next_check += VALIDATE_SECONDS
                say(held_out=validate(model, streams, plan))
                save()
        say(held_out=validate(model, streams, plan), done=True)
    save()
