"""The command line as a fixture."""

from __future__ import annotations

import os

import pytest
from commands import Run, runner


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`cli(*arguments, stdin="")`, without the options that the environment may hold."""
    for name in [name for name in os.environ if name.startswith("DOTLLM_")]:
        monkeypatch.delenv(name)
    return runner(monkeypatch, capsys)
