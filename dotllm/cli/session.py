"""A loaded model, ready to answer: an engine put together from options, its kernels compiled."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dotllm.cli.console import Console
from dotllm.errors import UsageError

if TYPE_CHECKING:
    from dotllm.cli.options import ModelOptions, SamplingOptions
    from dotllm.engine.engine import Engine
    from dotllm.engine.load import Loaded
    from dotllm.gguf.hparams import ModelConfig
    from dotllm.gguf.reader import GGUFFile
    from dotllm.ops.protocol import CacheType, Ops
    from dotllm.sampling.params import SamplingParams
    from dotllm.text.tokenizer import Tokenizer

__all__ = ["Session", "open_session", "sampling_params"]

MANY_ROWS = 64  # a step of so many rows uses every kernel that a longer one uses
SMALL_BYTES = 1 << 28  # a model below this computes MANY_ROWS in less time than it takes to notice
SLOW_SECONDS = 2.0  # after which somebody who waits is told why


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with; `load_ms` from the backend to compiled kernels."""

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
def open_session(
    path: Path,
    options: ModelOptions,
    console: Console,
    *,
    ops: Ops | None = None,
    checkpoints: int = 0,
    prompt: str | None = None,
) -> Iterator[Session]:
    """Load a model; `ops` in place of the backend that the options name. Raises whatever may be wrong with it.

    `prompt` is the only one that will come, if that is known: a short one needs fewer kernels to be compiled.
    """
    from dotllm.engine.load import load_engine
    from dotllm.ops.select import select_ops

    cache_type, chunk, start = _cache_type(options), _chunk(options), time.perf_counter()
    console.progress("starting the backend ...")
    try:
        ops = select_ops(options.backend, options.threads) if ops is None else ops
        loaded = load_engine(
            path,
            ops,
            context=options.ctx_size,
            checkpoints=checkpoints,
            cache_type=cache_type,
            max_rows=chunk,
            chunk=chunk,
            progress=lambda stage: console.progress(f"{path.name}: {stage} ..."),
        )
    finally:
        console.progress("")
    try:
        rows = min(loaded.context, chunk, _first_rows(loaded, prompt))
        _warm_up(loaded.engine, ops, rows, console, small=loaded.file.size < SMALL_BYTES)
        if loaded.context > loaded.config.context_length:
            console.note(
                f"warning: the model was trained for {loaded.config.context_length} tokens; beyond that its text may "
                "be poor",
                "yellow",
            )
        yield Session(
            path=path,
            file=loaded.file,
            config=loaded.config,
            tokenizer=loaded.tokenizer,
            ops=ops,
            engine=loaded.engine,
            backend=ops.name,
            threads=getattr(ops, "n_threads", None),
            context=loaded.context,
            cache_type=cache_type,
            load_ms=1e3 * (time.perf_counter() - start),
        )
    finally:
        loaded.close()


def _first_rows(loaded: Loaded, prompt: str | None) -> int:
    """Rows of the longest step that will come, as far as kernels differ by it."""
    if prompt is None or "tokenizer.chat_template" in loaded.file.metadata:
        return MANY_ROWS
    return min(MANY_ROWS, max(1, len(loaded.tokenizer.encode(prompt, add_special=True))))


def _warm_up(engine: Engine, ops: Ops, most: int, console: Console, *, small: bool) -> None:
    """Compile the kernels that the model needs, or load them from the cache, before anything is timed or streamed."""
    from dotllm.engine.load import warm_up
    from dotllm.ops.select import compiling

    if ops.name == "numpy":
        return
    done = threading.Event()

    def tell(compiled: Callable[[], bool]) -> None:
        while not done.wait(SLOW_SECONDS):
            if compiled():  # and not merely a slow model
                console.note("compiling kernels for this machine: this takes about a minute, once", "dim")
                return

    with compiling(ops) as compiled:
        threading.Thread(target=tell, args=(compiled,), daemon=True).start()
        try:
            warm_up(engine, (min(2, most),))
            if small or compiled():  # if these were compiled, those for one row and for more will have to be too
                warm_up(engine, (1, most))
        finally:
            done.set()


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
