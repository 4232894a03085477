"""One engine in a process of its own, which measures when it is told to: `peer_speed.py` starts one for each peer.

    python tools/peer_worker.py ENGINE MODEL CONTEXT THREADS [LLAMA_BENCH]

Reads lines `prompt COUNT` and `answer COUNT DEPTH`, and writes one line of JSON for each: {"seconds": ...}; the first
line it writes, once the model is loaded, is {"ready": ...}. Tokens are random ones. Ours go through the engine as
every request does, greedy sampling and the end-of-text check included; the others are given the next token and sample
nothing, as llama-bench does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

__all__ = ["ENGINES", "Runner"]


class Runner(Protocol):
    """What a worker wants of an engine. Both give seconds."""

    def prompt(self, count: int) -> float:
        """Reading a prompt of `count` tokens from an empty context, up to the logits of the last."""

    def answer(self, count: int, depth: int) -> float:
        """`count` single tokens after a prompt of `depth`, which is read before and not counted."""


def _tokens(count: int, vocabulary: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(vocabulary, size=count).tolist()
    return drawn


class Ours:
    """dotllm: requests to its engine."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        from dotllm.engine.load import load_engine
        from dotllm.ops.select import select_ops

        self._loaded = load_engine(path, select_ops("cpu", threads), context=context, checkpoints=0)

    def _times(self, prompt: int, answer: int) -> tuple[float, list[float]]:
        """When the request came, and when each token of the answer was there."""
        from dotllm.engine.request import Request

        tokens = _tokens(prompt, self._loaded.config.vocab_size, prompt)
        request = Request(tuple(tokens), max_tokens=answer, ignore_eos=True)
        start, times = time.perf_counter(), []
        for event in self._loaded.engine.generate(request):
            if event.error is not None:
                raise event.error
            times.append(time.perf_counter())
        return start, times

    def prompt(self, count: int) -> float:
        start, times = self._times(count, 1)
        return times[0] - start

    def answer(self, count: int, depth: int) -> float:
        _, times = self._times(depth, count + 1)  # the first comes with the prompt
        return times[-1] - times[0]


class Feeding:
    """A peer with `feed(tokens, first)`."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer

    def prompt(self, count: int) -> float:
        tokens, start = _tokens(count, self._peer.tokens, count), time.perf_counter()
        self._peer.feed(tokens, 0)
        return time.perf_counter() - start

    def answer(self, count: int, depth: int) -> float:
        tokens = _tokens(depth + count, self._peer.tokens, depth)
        self._peer.feed(tokens[:depth], 0)
        start = time.perf_counter()
        for i in range(depth, depth + count):
            self._peer.feed(tokens[i : i + 1], i)
        return time.perf_counter() - start


class Bench:
    """A llama-bench executable, started anew for each measurement; loading and warming up are not in its seconds."""

    def __init__(self, path: Path, threads: int, executable: str) -> None:
        self._command = [executable, "-m", str(path), "-t", str(threads), "-fa", "1", "-r", "1", "-o", "json"]

    def _seconds(self, *options: object) -> float:
        done = subprocess.run([*self._command, *map(str, options)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{self._command[0]} fails: {done.stderr.strip()[-300:]}")
        (test,) = json.loads(done.stdout)
        return float(test["avg_ns"]) / 1e9

    def prompt(self, count: int) -> float:
        return self._seconds("-p", count, "-n", 0)

    def answer(self, count: int, depth: int) -> float:
        return self._seconds("-p", 0, "-n", count, "-d", depth)


ENGINES = {
    "dotllm": "dotllm",
    "wheel": "llama.cpp, the wheel xllamacpp",
    "native": "llama.cpp, llama-bench",
    "ik": "ik_llama.cpp, the wheel ik-llama-cpp-python",
    "ik-plain": "ik_llama.cpp without flash attention",
}


def open_runner(engine: str, path: Path, context: int, threads: int, executable: str) -> Runner:
    """Load `path` in the engine of this name."""
    if engine == "dotllm":
        return Ours(path, context, threads)
    if engine == "native":
        return Bench(path, threads, executable)
    if engine in ("ik", "ik-plain"):
        from peer_ik import IkPeer

        return Feeding(IkPeer(path, context, threads, flash=engine == "ik"))
    from peer_llamacpp import Peer

    return Feeding(Peer(path, context, threads, defaults=True, mtp=False))


def main(arguments: list[str]) -> None:
    engine, model, context, threads, *executable = arguments
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library says on standard output is no answer
    runner = open_runner(engine, Path(model), int(context), int(threads), *executable or [""])
    print(json.dumps({"ready": engine}), file=answers)
    for line in sys.stdin:
        what, *numbers = line.split()
        seconds = runner.prompt(*map(int, numbers)) if what == "prompt" else runner.answer(*map(int, numbers))
        print(json.dumps({"seconds": seconds}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
