"""From a file to an engine: everything that has to be opened, checked and sized before the first request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from dotllm.batch import Batch
from dotllm.engine.engine import Engine
from dotllm.errors import ModelFileError, OutOfMemory, UsageError
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile
from dotllm.models.registry import load_model
from dotllm.ops.protocol import CacheType, Ops
from dotllm.state.blocks import pages_for
from dotllm.state.layout import StateLayout
from dotllm.state.manager import Extend, StateManager
from dotllm.text.tokenizer import Tokenizer

__all__ = ["DEFAULT_CONTEXT", "Loaded", "available_memory", "load_engine", "open_tokenizer", "warm_up"]

DEFAULT_CONTEXT = 4096
"""Positions of a request unless more are asked for, or the model has fewer."""

SHARED_PAGES = 2
"""Pages that a request has to copy: the last one of the checkpoint that it goes on from, and of the one it makes."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to answer, and what it was made of; `load_ms` milliseconds of the wall clock."""

    file: GGUFFile
    config: ModelConfig
    tokenizer: Tokenizer
    ops: Ops
    engine: Engine
    context: int
    load_ms: float

    def close(self) -> None:
        """Let go of the file; the engine must not be used any more."""
        self.file.close()


def load_engine(
    path: str | os.PathLike[str],
    ops: Ops,
    *,
    context: int | None = None,
    sequences: int = 1,
    checkpoints: int = 1,
    cache_type: CacheType = "f16",
    max_rows: int = 512,
    chunk: int = 512,
    progress: Progress = lambda stage: None,
) -> Loaded:
    """Open a model file and build an engine over it.

    `context` positions a request (None: the model's own, at most DEFAULT_CONTEXT; 0: the model's own); `sequences`
    requests run at once; there are pages for `checkpoints` more contexts. `progress` hears what begins now.
    Raises ModelFileError, UnsupportedModel, UsageError, or OutOfMemory if weights and state do not fit.
    """
    started = time.perf_counter()
    progress("reading the file")
    file = GGUFFile.open(path)
    try:
        config = ModelConfig.from_gguf(file)
        layout = StateLayout.of(config)
        length = _context(context, config)
        pages = (sequences + checkpoints) * (pages_for(length) + SHARED_PAGES)
        _check_memory(file, layout, pages, sequences, cache_type, length)
        progress("building the tokenizer")
        tokenizer = open_tokenizer(file)
        if tokenizer.vocab_size != config.vocab_size:
            raise ModelFileError(
                f"{file.path}: the tokenizer has {tokenizer.vocab_size} tokens and the embedding {config.vocab_size} "
                f"rows; the file is wrongly converted"
            )
        progress("loading the weights")
        model = load_model(file, ops, context=length)
        state = StateManager(ops, layout, pages=pages, sequences=sequences, cache_type=cache_type)
        engine = Engine(model, tokenizer, state, ops, context=length, max_rows=max_rows, chunk=chunk)
    except BaseException:
        file.close()
        raise
    return Loaded(file, config, tokenizer, ops, engine, length, 1e3 * (time.perf_counter() - started))


def open_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a file; its merge engine is kept in the user's cache directory."""
    status = file.path.stat()
    fingerprint = os.fsencode(f"{file.path.resolve()}|{status.st_size}|{status.st_mtime_ns}")
    folder = user_cache_path("dotllm", appauthor=False) / "tokenizers"
    return Tokenizer.from_metadata(file.metadata, cache_dir=folder, fingerprint=fingerprint)


def warm_up(engine: Engine, rows: Sequence[int] = (2,)) -> None:
    """Run the model in steps that are undone, one with each number of rows, so that its kernels are compiled.

    A backend may have other kernels for many rows than for few: after an installation (1, 64) leaves nothing to compile
    for the first request. Raises what the model raises.
    """
    state = engine.state
    sequence = state.open()
    try:
        for count in rows:
            with state.begin([Extend(sequence, count)]) as step:
                batch = Batch.build([[0] * count], [0], [1])
                hidden = engine.model.forward(batch, step)
                engine.model.logits(hidden, batch.logit_rows)
    finally:
        state.close(sequence)


def available_memory() -> int | None:
    """Bytes that can be used without swapping (Linux), or of the whole machine; None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no sysconf on Windows
        return None


def _context(wanted: int | None, config: ModelConfig) -> int:
    if wanted is None:
        return min(config.context_length, DEFAULT_CONTEXT)
    if wanted < 0:
        raise UsageError(f"The context is {wanted}; it must be at least 1, or 0 for the model's own.")
    return wanted or config.context_length


def _check_memory(
    file: GGUFFile, layout: StateLayout, pages: int, sequences: int, cache_type: CacheType, context: int
) -> None:
    state = StateManager.estimate(layout, pages=pages, sequences=sequences, cache_type=cache_type).total
    free = available_memory()
    if free is not None and file.size + state > free:
        raise OutOfMemory(
            f"{file.path}: the weights need {file.size / 2**30:.2f} GiB and the state of {sequences} x {context} "
            f"tokens {state / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB of memory are available; ask for a smaller "
            f"context, fewer sequences or a smaller model."
        )
