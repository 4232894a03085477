"""`bench`: the table, the JSON report, what is measured, and what cannot be. Never how fast it is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Run

from dotllm.cli import bench
from dotllm.cli.session import Session
from dotllm.engine.engine import Engine
from dotllm.engine.request import Request
from dotllm.gguf.hparams import ModelConfig
from dotllm.gguf.reader import GGUFFile

QUICK = ("--backend", "numpy", "-r", "3")


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dotllm.cli.bench._READ_LEAST", 1 << 16)
    monkeypatch.setattr("dotllm.cli.bench._READ_MOST", 1 << 20)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the engine was asked."""
    seen, submit = [], Engine.submit

    def watched(self: Engine, request: Request) -> int:
        seen.append(request)
        return submit(self, request)

    monkeypatch.setattr(Engine, "submit", watched)
    return seen


def test_the_table(cli: Run, tiny_gguf: Callable[..., Path]) -> None:
    result = cli("bench", str(tiny_gguf("qwen35", "Q8_0")), "-p", "12", "-n", "4", *QUICK)
    assert result.code == 0, result.err
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in result.out.splitlines())
    assert head == ["model", "size", "params", "backend", "threads", "test", "t/s", "read", "step"]
    assert len(rule) == len(head)
    assert [row[5] for row in rows] == ["pp12", "tg4", "tg4+1", "tg4+2", "tg4+3", "tg4+4"]
    assert [row[7].endswith("%") for row in rows] == [False, True, False, False, False, False]
    assert [row[8].startswith("x ") for row in rows] == [False, False, True, True, True, True]
    for row in rows:
        assert (row[0], row[3], row[4]) == ("qwen35 Q8_0", "numpy", "-")
        median, spread = map(float, row[6].split(" ± "))
        assert median > 0
        assert spread >= 0
    assert len({len(line) for line in result.out.splitlines()}) == 1
    assert "GB/s (1 at once)" in result.err
    assert "accepted" not in result.err  # all of them were


def test_the_report(cli: Run, tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("qwen35", "Q8_0")
    result = cli("bench", "-m", str(path), "-p", "0", "-n", "3", "--drafts", "2", "--json", *QUICK)
    report = json.loads(result.out)
    test, one, two = report["tests"]
    assert [test["test"], one["test"], two["test"]] == ["tg3", "tg3+1", "tg3+2"]
    assert (test["share_of_read"] > 0, test["relative_step"]) == (True, None)
    assert (two["share_of_read"], two["relative_step"] > 0) == (None, True)
    assert [(t["drafted_tokens"], t["accepted_tokens"]) for t in report["tests"]] == [(0, 0), (3, 3), (6, 6)]
    assert len(test["samples_tok_s"]) == 3
    assert test["median_tok_s"] == statistics.median(test["samples_tok_s"])
    assert test["stdev_tok_s"] == pytest.approx(statistics.stdev(test["samples_tok_s"]), abs=2e-3)
    assert report["read_bytes_per_s"] > 0
    assert (report["size_bytes"], report["model_path"]) == (path.stat().st_size, str(path))


def test_requests_are_random_and_as_long_as_asked(cli: Run, requests: list[Request]) -> None:
    assert cli("bench", "-p", "20", "-n", "5", "--drafts", "0", "--backend", "numpy", "-r", "2").code == 0
    assert [(len(r.prompt), r.max_tokens) for r in requests] == [(20, 1), (1, 6)] * 3
    assert len({r.prompt for r in requests}) == 6
    assert all(r.ignore_eos and r.resume is None for r in requests)
    before = [r.prompt for r in requests]
    cli("bench", "-p", "20", "-n", "5", "--drafts", "0", "--backend", "numpy", "-r", "2")
    assert [r.prompt for r in requests[6:]] == before


def test_the_cpu_backend_on_so_many_threads(cli: Run) -> None:
    report = json.loads(cli("bench", "-p", "8", "-n", "2", "--drafts", "0", "-r", "1", "-t", "1", "--json").out)
    assert (report["backend"], report["threads"]) == ("cpu", 1)
    assert [(t["test"], len(t["samples_tok_s"]), t["stdev_tok_s"]) for t in report["tests"]] == [
        ("pp8", 1, 0.0),
        ("tg2", 1, 0.0),
    ]


@pytest.mark.parametrize(
    "arguments",
    [("-p", "0", "-n", "0"), ("-p", "-1"), ("-n", "-1"), ("-r", "0"), ("-p", "64", "-c", "32"), ("--drafts", "-1")],
)
def test_what_cannot_be_measured(cli: Run, arguments: tuple[str, ...]) -> None:
    result = cli("bench", "--backend", "numpy", *arguments)
    assert result.code != 0
    assert result.out == ""
    assert result.err.startswith("Error: ")


def test_drafts_write_the_same_answer_in_fewer_steps(
    cli: Run, requests: list[Request], tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, plain = [], bench._run

    def watched(session: Session, request: Request) -> bench.Run:
        runs.append(plain(session, request))
        return runs[-1]

    monkeypatch.setattr(bench, "_run", watched)
    cli("bench", str(tiny_gguf("qwen35", "F32")), "-p", "0", "-n", "6", "--backend", "numpy", "-r", "1")
    assert [run.steps for run in runs] == [6, 3, 2, 2, 2] * 2
    assert len({run.answer for run in runs}) == len({r.prompt for r in requests}) == 2


def test_a_step_reads_no_mtp_head_and_only_the_experts_in_use(tiny_gguf: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_gguf("qwen35moe", "F32", untied=True, experts=8, experts_used=2)) as file:
        sizes = {name: len(tensor.data) for name, tensor in file.tensors.items() if not name.startswith("blk.4.")}
        experts = sum(size for name, size in sizes.items() if "_exps." in name)
        expected = sum(sizes.values()) - sizes["token_embd.weight"] - experts * 3 // 4
        assert bench.step_bytes(file, ModelConfig.from_gguf(file)) == expected


def _measured(*seconds: float) -> bench.Measured:
    return bench.Measured("tg", 8, 0, [bench.Run(1.0, taken, 8, (), 0, 0) for taken in seconds])


def test_median_and_spread() -> None:
    assert _measured(1.0, 0.5, 4.0).median == 8.0
    assert _measured(1.0, 0.5).spread == pytest.approx(8 * 2**-0.5)
    assert _measured(1.0).spread == 0.0
