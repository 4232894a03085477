"""`dotllm bench`: how fast a model reads a prompt and writes an answer on this machine, as llama-bench measures it.

Each repetition does all tests once, and reads memory, so that what is compared was measured within seconds. Tests
`tgN+K` write the same answer with K drafts a step that are all right, which is what speculation can gain at best: the
drafts are the answer of the test before, so nothing is spent on making them.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
    from dotllm.gguf.hparams import ModelConfig
    from dotllm.gguf.reader import GGUFFile
    from dotllm.spec.verify import Cursor
    from dotllm.state.manager import Step

__all__ = ["Measured", "Run", "bench", "step_bytes"]

_SEED = 1
_READ_LEAST, _READ_MOST = 256 << 20, 1 << 30  # more than caches hold, and not all of the memory
_BLOCK = re.compile(r"blk\.(\d+)\.")
_MTP_DRAFTS = 4  # tests with drafts unless told otherwise, of models that can draft for themselves


@dataclass(frozen=True, slots=True)
class Run:
    """One timed request: seconds of the prompt with the first token, and of the rest with the steps it took."""

    prompt_s: float
    answer_s: float
    steps: int
    answer: tuple[int, ...]
    drafted: int
    accepted: int


@dataclass(slots=True)
class Measured:
    """One test: `tokens` of a prompt, or of an answer with `drafts` a step; and its runs in order."""

    kind: str
    tokens: int
    drafts: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def test(self) -> str:
        return f"{self.kind}{self.tokens}" + f"+{self.drafts}" * bool(self.drafts)

    @property
    def rates(self) -> list[float]:
        """Tokens a second."""
        return [self.tokens / (run.prompt_s if self.kind == "pp" else run.answer_s) for run in self.runs]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Standard deviation; 0 of one repetition."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of one step of an answer."""
        return [run.answer_s / run.steps for run in self.runs]


@dataclass(frozen=True, slots=True)
class _Results:
    tests: list[Measured]
    reads: list[float]  # bytes a second, of each repetition
    step_bytes: int

    @property
    def read(self) -> float:
        return statistics.median(self.reads)

    @property
    def plain(self) -> Measured | None:
        """The test without drafts."""
        return next((test for test in self.tests if test.kind == "tg"), None)

    def share(self, test: Measured) -> float | None:
        """Bytes of weights that a second of plain writing needs, divided by what a second can read; a median."""
        if test is not self.plain:
            return None
        pairs = zip(test.step_seconds, self.reads, strict=True)
        return statistics.median(self.step_bytes / seconds / read for seconds, read in pairs)

    def relative(self, test: Measured) -> float | None:
        """How long a step takes with drafts, relative to one without; a median."""
        if self.plain is None or not test.drafts:
            return None
        pairs = zip(test.step_seconds, self.plain.step_seconds, strict=True)
        return statistics.median(seconds / plain for seconds, plain in pairs)


def bench(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    n_prompt: Annotated[
        int, flag("-p", "--n-prompt", metavar="N", help="Tokens of the prompt that is read; 0 = do not measure.")
    ] = 512,
    n_gen: Annotated[
        int, flag("-n", "--n-gen", metavar="N", help="Tokens that are written; 0 = do not measure.")
    ] = 128,
    drafts: Annotated[
        int | None,
        flag(
            "--drafts",
            metavar="K",
            help="Write with 1 .. K drafts a step too, all of them right (4 for a model with an MTP head, else 0).",
        ),
    ] = None,
    repetitions: Annotated[int, flag("-r", "--repetitions", metavar="N", help="Timed runs of each test.")] = 5,
    as_json: Json = False,
    *,
    how: ModelOptions,
    output: OutputOptions,
) -> None:
    """Measure tokens a second: of a prompt of random tokens (pp), and of an answer, one request alone (tg)."""
    console = Console(quiet=output.quiet)
    set_log_level(verbose=output.verbose, quiet=output.quiet)
    if min(n_prompt, n_gen, drafts or 0) < 0 or n_prompt == n_gen == 0:
        raise UsageError(f"-p {n_prompt} -n {n_gen}: give at least one number of tokens to measure, and none below 0")
    if repetitions < 1:
        raise UsageError(f"-r is {repetitions}; it must be at least 1")
    if how.ctx_size is None:  # what the tests need, whatever the model could take
        how = replace(how, ctx_size=max(n_prompt + 1, n_gen + 2))
    with open_session(model_path(model, model_flag), how, console) as session:
        if drafts is None:
            drafts = 0 if session.config.mtp is None else _MTP_DRAFTS
        tests = [Measured("pp", n_prompt)] * bool(n_prompt)
        tests += [Measured("tg", n_gen, k) for k in range(drafts + 1)] if n_gen else []
        results = _measure(session, console, tests, repetitions)
        if as_json:
            console.write(json.dumps(_report(session, results), ensure_ascii=False) + "\n")
        else:
            console.write("\n".join(_table(session, results)) + "\n")
            console.note(_read_text(session, results), "dim")
            for line in filter(None, map(_draft_text, results.tests)):
                console.note(line, "dim")


# ---- measuring -------------------------------------------------------------------------------------------------------
class _Replay:
    """Drafts that are always right, because they were the answer before."""

    def __init__(self) -> None:
        self.drafts = 0
        self.answer: tuple[int, ...] = ()

    def depth(self, cursor: Cursor) -> int:
        return self.drafts

    def propose(self, step: Step, cursors: Sequence[Cursor], depths: Sequence[int]) -> Sequence[Sequence[int]]:
        return [self.answer[c.generated : c.generated + depth] for c, depth in zip(cursors, depths, strict=True)]


def _measure(session: Session, console: Console, tests: list[Measured], repetitions: int) -> _Results:
    """All tests in turns, once more than is asked for: the first time warms up and is left out."""
    from dotllm.engine.engine import Engine

    replay, plain = _Replay(), session.engine
    engine = Engine(plain.model, plain.tokenizer, plain.state, session.ops, context=session.context, drafter=replay)
    drafting = replace(session, engine=engine)
    read_rate, reads = _reader(session.file.size, session.threads or 1), []
    for number in range(repetitions + 1):
        for test in tests:
            console.progress(f"{test.test}: " + (f"{number} of {repetitions} ..." if number else "warming up ..."))
            replay.drafts = test.drafts
            run = _run(drafting if test.drafts else session, _request(session, test, number))
            replay.answer = run.answer
            test.runs += [run] * bool(number)
        console.progress("reading memory ...")
        reads.append(read_rate())
    console.progress("")
    return _Results(tests, reads[1:], step_bytes(session.file, session.config))


def _request(session: Session, test: Measured, number: int) -> Request:
    """Tests that write differ in nothing but their drafts. One more token is written, as the first is the prompt's."""
    import numpy as np

    from dotllm.engine.request import Request

    prompt, answer = (test.tokens, 1) if test.kind == "pp" else (1, test.tokens + 1)
    tokens = np.random.default_rng((_SEED, number)).integers(session.config.vocab_size, size=prompt)
    return Request(tuple(tokens.tolist()), max_tokens=answer, ignore_eos=True)


def _run(session: Session, request: Request) -> Run:
    times, tokens, stats = [], [], None
    steps, start = session.engine.stats.steps, time.perf_counter()
    for event in answer_events(session, request):
        times.append(time.perf_counter())
        tokens += [] if event.token is None else [event.token]
        stats = event.stats or stats
    if stats is None:
        raise DotLLMError("the engine gave no answer")
    return Run(
        prompt_s=times[0] - start,
        answer_s=times[-1] - times[0],
        steps=session.engine.stats.steps - steps - 1,
        answer=tuple(tokens),
        drafted=stats.drafted_tokens,
        accepted=stats.accepted_tokens,
    )


def step_bytes(file: GGUFFile, config: ModelConfig) -> int:
    """Bytes of weights that a step of one row reads: not an embedding of which it takes one row, nor an MTP head,
    and of experts those that are used.
    """
    total = 0.0
    for name, tensor in file.tensors.items():
        block = _BLOCK.match(name)
        if block is not None and int(block[1]) >= len(config.layers):
            continue
        if name == "token_embd.weight" and "output.weight" in file.tensors:
            continue
        experts = config.experts if "_exps." in name else None
        total += len(tensor.data) * (1 if experts is None else experts.used / experts.count)
    return round(total)


def _reader(size: int, threads: int) -> Callable[[], float]:
    """A function that reads a buffer as large as the file (within limits), `threads` parts at once: bytes a second."""
    import numpy as np

    size = min(max(size, _READ_LEAST), _READ_MOST)
    parts = np.array_split(np.ones(size // 8, np.uint64), threads)  # written, so that its pages exist

    def rate() -> float:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(np.bitwise_or.reduce, [part[:512] for part in parts]))  # the threads start
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            return size / (time.perf_counter() - start)

    return rate


# ---- reporting -------------------------------------------------------------------------------------------------------
def _table(session: Session, results: _Results) -> list[str]:
    config = session.config
    rows = [["model", "size", "params", "backend", "threads", "test", "t/s", "read", "step"]]
    for test in results.tests:
        share, relative = results.share(test), results.relative(test)
        rows.append(
            [
                f"{config.architecture} {config.file_type}",
                bytes_text(session.file.size),
                f"{parameters(session.file) / 1e6:.2f} M",
                session.backend,
                str(session.threads or "-"),
                test.test,
                f"{test.median:.2f} ± {test.spread:.2f}",
                "-" if share is None else f"{share:.0%}",
                "-" if relative is None else f"x {relative:.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (True, False, False, True, False, False, False, False, False)
    rule = ["-" * width if to_left else "-" * (width - 1) + ":" for width, to_left in zip(widths, left, strict=True)]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        cells = zip(row, widths, left, strict=True)
        lines.append(f"| {' | '.join(c.ljust(width) if to_left else c.rjust(width) for c, width, to_left in cells)} |")
    return lines


def _read_text(session: Session, results: _Results) -> str:
    times = results.read / results.step_bytes
    return (
        f"read: a step of one row reads {bytes_text(results.step_bytes)} of weights; a plain read of memory reaches "
        f"{results.read / 1e9:.1f} GB/s ({session.threads or 1} at once), that is {times:.1f} times as many a second"
    )


def _draft_text(test: Measured) -> str:
    drafted, accepted = sum(run.drafted for run in test.runs), sum(run.accepted for run in test.runs)
    return f"{test.test}: {accepted} of {drafted} drafted tokens accepted" if drafted > accepted else ""


def _report(session: Session, results: _Results) -> dict[str, Any]:
    return {
        "version": __version__,
        "model": session.config.name,
        "model_path": str(session.path),
        "architecture": session.config.architecture,
        "file_type": session.config.file_type,
        "size_bytes": session.file.size,
        "step_bytes": results.step_bytes,
        "parameters": parameters(session.file),
        "backend": session.backend,
        "threads": session.threads,
        "cache_type": session.cache_type,
        "read_bytes_per_s": round(results.read),
        "tests": [
            {
                "test": test.test,
                "median_tok_s": round(test.median, 3),
                "stdev_tok_s": round(test.spread, 3),
                "samples_tok_s": [round(rate, 3) for rate in test.rates],
                "share_of_read": results.share(test),
                "relative_step": results.relative(test),
                "drafted_tokens": sum(run.drafted for run in test.runs),
                "accepted_tokens": sum(run.accepted for run in test.runs),
            }
            for test in results.tests
        ],
    }
