"""Engines over tiny models for tests, and the loop they must agree with, written out by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from letters import Letters

from dotllm.batch import Batch
from dotllm.engine.engine import Engine
from dotllm.engine.request import Event
from dotllm.gguf.reader import GGUFFile
from dotllm.models.registry import load_model
from dotllm.state.blocks import pages_for
from dotllm.state.layout import StateLayout
from dotllm.state.manager import Extend, StateManager

__all__ = ["CONTEXT", "Lab", "answer", "events_of", "prompt_of", "run_all", "text_of"]

CONTEXT = 160


@dataclass
class Lab:
    """One loaded model; `engine` gives fresh engines over it."""

    path: Path
    ops: Any
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = load_model(GGUFFile.open(self.path), self.ops, context=CONTEXT)

    @property
    def layout(self) -> StateLayout:
        return StateLayout.of(self.model.config)

    def state(self, sequences: int = 8, pages: int | None = None) -> StateManager:
        pages = sequences * (pages_for(CONTEXT) + 1) if pages is None else pages
        return StateManager(self.ops, self.layout, pages=pages, sequences=sequences, logged_rows=64)

    def engine(
        self,
        *,
        sequences: int = 8,
        pages: int | None = None,
        ends: Collection[int] = (),
        model: Any = None,
        **more: Any,
    ) -> Engine:
        state = self.state(sequences, pages)
        return Engine(model or self.model, Letters(ends), state, self.ops, context=CONTEXT, **more)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Plain greedy decoding without the engine: the prompt at once, then token after token."""
        state = self.state(1)
        sequence, tokens, out = state.open(), list(prompt), []
        while len(out) < count:
            with state.begin([Extend(sequence, len(tokens))]) as step:
                batch = Batch.build([tokens], [sequence.length], [1])
                hidden = self.model.forward(batch, step)
                logits = self.ops.get(self.model.logits(hidden, batch.logit_rows))
                step.commit([len(tokens)], hidden)
            out.append(int(np.argmax(logits[0])))
            tokens = out[-1:]
        return out


def prompt_of(seed: int, length: int, vocabulary: int = 300) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(10, vocabulary, length))


def run_all(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def events_of(events: Sequence[Event], number: int) -> list[Event]:
    return [event for event in events if event.request == number]


def answer(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events)
