"""A loaded model, ready to answer: file, tokenizer, template, backend, state and engine, put together from options."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dotllm.cli.console import Console, bytes_text
from dotllm.errors import OutOfMemory, UsageError

if TYPE_CHECKING:
    from dotllm.cli.options import ModelOptions, SamplingOptions
    from dotllm.engine.engine import Engine
    from dotllm.gguf.hparams import ModelConfig
    from dotllm.gguf.reader import GGUFFile
    from dotllm.ops.protocol import CacheType, Ops
    from dotllm.sampling.params import SamplingParams
    from dotllm.state.layout import StateLayout
    from dotllm.text.tokenizer import Tokenizer

__all__ = ["Session", "open_session", "open_tokenizer", "sampling_params"]

DEFAULT_CONTEXT = 4096
CHECKPOINT_PAGES = 8  # for pages that a request shares with checkpoints and has to copy


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with."""

    path: Path
    file: GGUFFile
    config: ModelConfig
    tokenizer: Tokenizer
    ops: Ops
    engine: Engine
    backend: str
    threads: int | None
    context: int
    cache_type: str
    load_ms: float


@contextmanager
def open_session(path: Path, options: ModelOptions, console: Console, *, ops: Ops | None = None) -> Iterator[Session]:
    """Load a model; `ops` in place of the backend that the options name. Raises whatever may be wrong with it."""
    from dotllm.engine.engine import Engine
    from dotllm.gguf.hparams import ModelConfig
    from dotllm.gguf.reader import GGUFFile
    from dotllm.models.registry import load_model
    from dotllm.ops.select import select_ops
    from dotllm.state.blocks import pages_for
    from dotllm.state.layout import StateLayout
    from dotllm.state.manager import StateManager

    cache_type, chunk = _cache_type(options), _chunk(options)
    start = time.perf_counter()
    console.progress(f"loading {path.name} ...")
    try:
        with GGUFFile.open(path) as file:
            config = ModelConfig.from_gguf(file)
            layout = StateLayout.of(config)
            context = _context(options.ctx_size, config, console)
            pages = pages_for(context) + CHECKPOINT_PAGES
            _check_fits(layout, pages, cache_type, context)
            tokenizer = open_tokenizer(file)
            ops = select_ops(options.backend, options.threads) if ops is None else ops
            model = load_model(file, ops, context=context)
            state = StateManager(ops, layout, pages=pages, sequences=1, cache_type=cache_type)
            engine = Engine(model, tokenizer, state, ops, context=context, max_rows=chunk, chunk=chunk)
            load_ms = 1e3 * (time.perf_counter() - start)
            console.progress("")
            threads = getattr(ops, "n_threads", None)
            yield Session(path, file, config, tokenizer, ops, engine, ops.name, threads, context, cache_type, load_ms)
    finally:
        console.progress("")


def open_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a file, its merge engine from the user's cache if it is there."""
    from platformdirs import user_cache_path

    from dotllm.text.tokenizer import Tokenizer

    status = file.path.stat()
    fingerprint = f"{file.path.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode()
    folder = user_cache_path("dotllm", appauthor=False) / "tokenizers"
    return Tokenizer.from_metadata(file.metadata, cache_dir=folder, fingerprint=fingerprint)


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """Checked sampling parameters; raises UsageError."""
    from dotllm.sampling.params import SamplingParams

    return SamplingParams(
        temperature=options.temp,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        repeat_last_n=options.repeat_last_n,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(map(_bias, options.logit_bias)),
        seed=options.seed,
        top_logprobs=options.top_logprobs,
    )


def _bias(text: str) -> tuple[int, float]:
    """15043+1.5 or 15043-inf."""
    match = re.fullmatch(r"(\d+)([+-](?:inf|\d+(?:\.\d+)?))", text)
    if match is None:
        raise UsageError(f"--logit-bias {text!r}: a token id, then + or - and a number, as 15043+1 or 15043-inf")
    return int(match[1]), float(match[2])


def _cache_type(options: ModelOptions) -> CacheType:
    keys, values = options.cache_type_k, options.cache_type_v
    for flag, value in (("--cache-type-k", keys), ("--cache-type-v", values)):
        if value not in ("f32", "f16"):
            raise UsageError(f"{flag} is {value!r}; it can be f32 or f16")
    if keys != values:
        raise UsageError(f"keys in {keys} and values in {values}: this version keeps both in one type; set both flags")
    return cast("CacheType", keys)


def _chunk(options: ModelOptions) -> int:
    if options.ubatch_size < 1:
        raise UsageError(f"--ubatch-size is {options.ubatch_size}; it must be at least 1")
    return options.ubatch_size


def _context(wanted: int | None, config: ModelConfig, console: Console) -> int:
    own = config.context_length
    if wanted is None:
        return min(own, DEFAULT_CONTEXT)
    if wanted < 0:
        raise UsageError(f"--ctx-size is {wanted}; it must be at least 1, or 0 for the model's own")
    if wanted > own:
        console.note(f"warning: the model was trained for {own} tokens; beyond that its text may be poor", "yellow")
    return wanted or own


def _check_fits(layout: StateLayout, pages: int, cache_type: CacheType, context: int) -> None:
    """Refuse a context that the machine's free memory cannot hold, before it is allocated."""
    need = layout.estimate(pages=pages, sequences=1, cache_type=cache_type, mtp=False, logged_rows=0).total
    free = _available_memory()
    if free is not None and need > free:
        raise OutOfMemory(
            f"a context of {context} tokens needs {bytes_text(need)} for the state of this model, and "
            f"{bytes_text(free)} of memory are available; choose a smaller --ctx-size"
        )


def _available_memory() -> int | None:
    """Bytes that can be used without swapping, where the system tells (Linux)."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
