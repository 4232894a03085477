"""Speed of dotllm and its peers on the same files, in turns: what `compare_peer.py --speed` does.

Each engine has a process of its own that stays; one works at a time, and the others are stopped (SIGSTOP), since
threads that wait for work spin for a while. A round asks every engine for a prompt, then every engine for an answer,
beginning with the next engine each time; the first round warms up and is not counted. What is compared are ratios
within a round: clocks, memory and neighbours drift from one minute to the next, and hit all engines of a round alike.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from peer_worker import ENGINES

__all__ = ["Compared", "EngineFailed", "Task", "Worker", "compare_file", "native_bench", "report", "show"]

OURS = "dotllm"
REPO = Path(__file__).resolve().parent.parent


class EngineFailed(Exception):
    """An engine ended where it should have answered; the message is the last that it said."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of every engine: `tokens` of a prompt, or of an answer after a prompt of `depth`."""

    what: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"pp{self.tokens}" if self.what == "prompt" else f"tg{self.tokens}"

    @property
    def line(self) -> str:
        return f"prompt {self.tokens}" if self.what == "prompt" else f"answer {self.tokens} {self.depth}"


class Worker:
    """A process of `peer_worker.py` that has loaded a model, and is stopped whenever it is not asked.

    A context manager. Raises EngineFailed where the engine cannot do what it is asked.
    """

    def __init__(self, engine: str, model: Path, context: int, threads: int, executable: str = "") -> None:
        path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, str(REPO / "tools" / "peer_worker.py")]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [*command, engine, str(model), str(context), str(threads), *filter(None, [executable])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            self._answer("ready")
        except BaseException:
            self.close()
            raise
        self._signal("SIGSTOP")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def seconds(self, test: Task) -> float:
        """Wake the engine, let it do this once, and put it to sleep again."""
        self._signal("SIGCONT")
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(test.line + "\n")
            return float(self._answer("seconds"))
        except OSError:
            raise self._failure() from None
        finally:
            self._signal("SIGSTOP")

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _answer(self, key: str) -> Any:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise self._failure()
        return json.loads(line)[key]

    def _failure(self) -> EngineFailed:
        code = self._process.wait()
        self._said.seek(0)
        said = [line.strip() for line in self._said if line.strip()]
        return EngineFailed(f"{said[-1] if said else 'it says nothing'} (exit {code})")

    def _signal(self, name: str) -> None:
        if (
            hasattr(signal, name) and self._process.poll() is None
        ):  # Windows has neither; threads there spin for a while
            self._process.send_signal(getattr(signal, name))


@dataclass(frozen=True, slots=True)
class Compared:
    """One file: seconds of every round by test and engine, and why an engine is missing."""

    model: str
    size: int
    threads: int
    tests: tuple[Task, ...]
    seconds: Mapping[str, Mapping[str, list[float]]]
    missing: Mapping[str, str] = field(default_factory=dict)

    def rate(self, test: Task, engine: str) -> float:
        """Tokens a second, median."""
        return test.tokens / statistics.median(self.seconds[test.name][engine])

    def ratios(self, test: Task, peer: str) -> list[float]:
        """How many times as fast we are, in each round; in order of size."""
        taken = self.seconds[test.name]
        return sorted(theirs / ours for ours, theirs in zip(taken[OURS], taken[peer], strict=True))


def native_bench(given: str | None) -> str | None:
    """The llama-bench to use: the one that is given, else one on the PATH, else None. Exits if the given is none."""
    found = shutil.which(given or "llama-bench")
    if given and found is None:
        raise SystemExit(f"--native {given}: there is no such program")
    return found


def compare_file(
    model: Path,
    tests: Sequence[Task],
    engines: Mapping[str, str],
    rounds: int,
    threads: int,
    tell: Callable[[str], None],
) -> Compared:
    """Measure one file with all engines (name: executable, if it has one) that can load it."""
    context = max(test.tokens + test.depth for test in tests) + 2  # ours wants room for the token that comes last
    seconds: dict[str, dict[str, list[float]]] = {test.name: {engine: [] for engine in engines} for test in tests}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for engine, executable in engines.items():
            tell(f"{model.name}: {engine} loads ...")
            try:
                workers[engine] = stack.enter_context(Worker(engine, model, context, threads, executable))
            except EngineFailed as error:
                missing[engine] = str(error)
        for number in range(rounds + 1):
            for test in tests:
                for engine in _turns(list(workers), number):
                    tell(f"{model.name}: {test.name}, round {number} of {rounds}, {engine} ...")
                    try:
                        taken = workers[engine].seconds(test)
                    except EngineFailed as error:
                        missing[engine] = str(error)
                        del workers[engine]
                        continue
                    if number:
                        seconds[test.name][engine].append(taken)
    tell("")
    whole = {name: {engine: taken[engine] for engine in workers} for name, taken in seconds.items()}
    return Compared(model.name, model.stat().st_size, threads, tuple(tests), whole, missing)


def _turns(engines: list[str], number: int) -> list[str]:
    """In another order each round: whoever comes first may find caches and clocks as nobody after it does."""
    first = number % max(1, len(engines))
    return engines[first:] + engines[:first]


def report(compared: Compared) -> dict[str, Any]:
    """For --json."""
    tests = []
    for test in compared.tests:
        engines = {}
        for engine, seconds in compared.seconds[test.name].items():
            engines[engine] = {"tok_s": round(compared.rate(test, engine), 3), "seconds": seconds}
            if engine != OURS and OURS in compared.seconds[test.name]:
                ratios = compared.ratios(test, engine)
                engines[engine] |= {"ratio": round(statistics.median(ratios), 4), "ratios": ratios}
        tests.append({**asdict(test), "test": test.name, "engines": engines})
    return {
        "model": compared.model,
        "size_bytes": compared.size,
        "threads": compared.threads,
        "tests": tests,
        "missing": dict(compared.missing),
    }


def show(compared: Compared) -> str:
    """For people: a table a file, one line an engine."""
    rounds = max((len(s) for taken in compared.seconds.values() for s in taken.values()), default=0)
    lines = [f"{compared.model} ({compared.size / 1e9:.2f} GB), {compared.threads} threads, {rounds} rounds"]
    for test in compared.tests:
        taken = compared.seconds[test.name]
        for engine in taken:
            line = f"  {test.name:<8}{engine:<9}{compared.rate(test, engine):>10.2f} t/s"
            if engine != OURS and OURS in taken:
                ratios = compared.ratios(test, engine)
                line += f"   dotllm x {statistics.median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
            lines.append(line)
    lines += [f"  {ENGINES[engine]}: {why}" for engine, why in compared.missing.items()]
    return "\n".join(lines)
