"""Runs the `dotllm` command inside this process: no start-up, no second compilation, and a debugger reaches it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dotllm.cli.app import main

__all__ = ["Result", "Run", "runner"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments, stdin="")`: what the command printed, and its exit code. Nothing is a terminal."""

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(end.value.code or 0, captured.out, captured.err)  # type: ignore[arg-type]

    return run
