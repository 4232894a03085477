"""`dotllm bench`: how fast a model reads a prompt and writes an answer on this machine, as llama-bench measures it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from dotllm import __version__
from dotllm.cli.console import Console, bytes_text, set_log_level
from dotllm.cli.inspect import parameters
from dotllm.cli.locate import model_path
from dotllm.cli.options import Json, ModelArgument, ModelFlag, ModelOptions, OutputOptions, flag
from dotllm.cli.run import answer_events
from dotllm.cli.session import Session, open_session
from dotllm.errors import DotLLMError, UsageError

if TYPE_CHECKING:
    from dotllm.engine.request import Request
    from dotllm.engine.stats import RequestStats

__all__ = ["Measured", "bench"]

_SEED = 1
_READ_LEAST, _READ_MOST = 256 << 20, 1 << 30  # more than caches hold, and not all of the memory


@dataclass(frozen=True, slots=True)
class Measured:
    """One test: its name, tokens a second of each repetition, and the drafts of all of them."""

    test: str
    rates: tuple[float, ...]
    drafted: int
    accepted: int

    @classmethod
    def of(cls, test: str, runs: Sequence[RequestStats], rates: Sequence[float]) -> Measured:
        drafted, accepted = sum(stats.drafted_tokens for stats in runs), sum(stats.accepted_tokens for stats in runs)
        return cls(test, tuple(rates), drafted, accepted)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Standard deviation; 0 of one repetition."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


def bench(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    n_prompt: Annotated[
        int, flag("-p", "--n-prompt", metavar="N", help="Tokens of the prompt that is read; 0 = do not measure.")
    ] = 512,
    n_gen: Annotated[int, flag("-n", "--n-gen", metavar="N", help="Tokens that are written; 0 = do not measure.")] = 64,
    repetitions: Annotated[int, flag("-r", "--repetitions", metavar="N", help="Timed runs of each test.")] = 5,
    as_json: Json = False,
    *,
    how: ModelOptions,
    output: OutputOptions,
) -> None:
    """Measure tokens a second: of a prompt of random tokens (pp), and of an answer, one request alone (tg)."""
    console = Console(quiet=output.quiet)
    set_log_level(verbose=output.verbose, quiet=output.quiet)
    if min(n_prompt, n_gen) < 0 or n_prompt == n_gen == 0:
        raise UsageError(f"-p {n_prompt} -n {n_gen}: give at least one number of tokens to measure, and none below 0")
    if repetitions < 1:
        raise UsageError(f"-r is {repetitions}; it must be at least 1")
    if how.ctx_size is None:  # what the tests need, whatever the model could take
        how = replace(how, ctx_size=max(n_prompt + 1, n_gen + 2))
    with open_session(model_path(model, model_flag), how, console) as session:
        results = _measure(session, console, n_prompt, n_gen, repetitions)
        console.progress("reading memory ...")
        read = _read_rate(session.file.size, session.threads or 1, repetitions)
        console.progress("")
        if as_json:
            console.write(json.dumps(_report(session, results, read), ensure_ascii=False) + "\n")
        else:
            console.write("\n".join(_table(session, results)) + "\n")
            console.note(_read_text(session, read), "dim")
            for line in filter(None, map(_draft_text, results)):
                console.note(line, "dim")


# ---- measuring -------------------------------------------------------------------------------------------------------
def _measure(session: Session, console: Console, n_prompt: int, n_gen: int, repetitions: int) -> list[Measured]:
    results = []
    if n_prompt:
        name = f"pp{n_prompt}"
        runs = _runs(session, console, name, repetitions, n_prompt, 1)
        results.append(Measured.of(name, runs, [stats.prefill_rate for stats in runs]))
    if n_gen:  # one more is written: the first comes with the prompt, and is not counted
        name = f"tg{n_gen}"
        runs = _runs(session, console, name, repetitions, 1, n_gen + 1)
        results.append(Measured.of(name, runs, [stats.decode_rate for stats in runs]))
    return results


def _runs(
    session: Session, console: Console, name: str, repetitions: int, n_prompt: int, n_gen: int
) -> list[RequestStats]:
    """Requests with so many tokens of prompt and answer, one after the other; a first one that warms up is left out."""
    runs = []
    for number in range(repetitions + 1):
        console.progress(f"{name}: " + (f"{number} of {repetitions} ..." if number else "warming up ..."))
        runs.append(_run(session, _request(session, n_prompt, n_gen, number)))
    return runs[1:]


def _request(session: Session, n_prompt: int, n_gen: int, number: int) -> Request:
    import numpy as np

    from dotllm.engine.request import Request

    tokens = np.random.default_rng((_SEED, number)).integers(session.config.vocab_size, size=n_prompt)
    return Request(tuple(tokens.tolist()), max_tokens=n_gen, ignore_eos=True)


def _run(session: Session, request: Request) -> RequestStats:
    for event in answer_events(session, request):
        if event.stats is not None:
            return event.stats
    raise DotLLMError("the engine gave no answer")


def _read_rate(size: int, threads: int, repetitions: int) -> float:
    """Bytes a second at which NumPy sums a buffer as large as the file (within limits), `threads` parts at once."""
    import numpy as np

    size = min(max(size, _READ_LEAST), _READ_MOST)
    parts = np.array_split(np.ones(size // 8, np.uint64), threads)  # written, so that its pages exist
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions + 1):
            start = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds[1:])


# ---- reporting -------------------------------------------------------------------------------------------------------
def _table(session: Session, results: list[Measured]) -> list[str]:
    config = session.config
    rows = [["model", "size", "params", "backend", "threads", "test", "t/s"]]
    rows += (
        [
            f"{config.architecture} {config.file_type}",
            bytes_text(session.file.size),
            f"{parameters(session.file) / 1e6:.2f} M",
            session.backend,
            str(session.threads or "-"),
            result.test,
            f"{result.median:.2f} ± {result.spread:.2f}",
        ]
        for result in results
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (True, False, False, True, False, False, False)
    rule = ["-" * width if to_left else "-" * (width - 1) + ":" for width, to_left in zip(widths, left, strict=True)]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        cells = zip(row, widths, left, strict=True)
        lines.append(f"| {' | '.join(c.ljust(width) if to_left else c.rjust(width) for c, width, to_left in cells)} |")
    return lines


def _read_text(session: Session, read: float) -> str:
    return (
        f"memory: {read / 1e9:.1f} GB/s (NumPy sums, {session.threads or 1} at once), "
        f"which would read as many bytes as the file has {read / session.file.size:.1f} times a second"
    )


def _draft_text(result: Measured) -> str:
    if not result.drafted:
        return ""
    return f"{result.test}: {result.accepted} of {result.drafted} drafted tokens accepted"


def _report(session: Session, results: list[Measured], read: float) -> dict[str, Any]:
    return {
        "version": __version__,
        "model": session.config.name,
        "model_path": str(session.path),
        "architecture": session.config.architecture,
        "file_type": session.config.file_type,
        "size_bytes": session.file.size,
        "parameters": parameters(session.file),
        "backend": session.backend,
        "threads": session.threads,
        "cache_type": session.cache_type,
        "read_bytes_per_s": round(read),
        "tests": [
            {
                "test": result.test,
                "median_tok_s": round(result.median, 3),
                "stdev_tok_s": round(result.spread, 3),
                "samples_tok_s": [round(rate, 3) for rate in result.rates],
                "drafted_tokens": result.drafted,
                "accepted_tokens": result.accepted,
            }
            for result in results
        ],
    }
