"""`compare_peer.py --speed`: whose turn it is, engines that fail, ratios. Never how fast anything is."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import compare_peer
import peer_speed
import pytest
from peer_speed import Compared, EngineFailed, Task

PROMPT, ANSWER = Task("prompt", 8), Task("answer", 4, 2)
STORY = Path(str(files("dotllm") / "data" / "story-q8_0.gguf"))


class Toy:
    """A worker that keeps a diary in place of working."""

    diary: list[tuple[str, str]] = []  # noqa: RUF012 - of all of them, emptied by the fixture
    broken: tuple[str, ...] = ()

    def __init__(self, engine: str, model: Path, context: int, threads: int, executable: str) -> None:
        if f"{engine} loads" in self.broken:
            raise EngineFailed("no such architecture")
        self.engine = engine

    def __enter__(self) -> Toy:
        return self

    def __exit__(self, *_: object) -> None:
        self.diary.append((self.engine, "closed"))

    def seconds(self, test: Task) -> float:
        if self.engine in self.broken:
            raise EngineFailed("killed")
        self.diary.append((self.engine, test.name))
        return {"dotllm": 1.0, "wheel": 3.0, "ik": 2.0}[self.engine]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Toy]:
    monkeypatch.setattr(peer_speed, "Worker", Toy)
    monkeypatch.setattr(Toy, "diary", [])
    return Toy


def _compared(rounds: int = 2) -> Compared:
    engines = {"dotllm": "", "wheel": "", "ik": ""}
    return peer_speed.compare_file(STORY, [PROMPT, ANSWER], engines, rounds, 1, lambda text: None)


def test_engines_take_turns_and_another_begins_each_round(toy: type[Toy]) -> None:
    _compared()
    names = [engine for engine, what in toy.diary if what == "pp8"]
    assert names == ["dotllm", "wheel", "ik", "wheel", "ik", "dotllm", "ik", "dotllm", "wheel"]
    assert [what for _, what in toy.diary[:6]] == ["pp8"] * 3 + ["tg4"] * 3
    assert [what for _, what in toy.diary[-3:]] == ["closed"] * 3


def test_the_round_that_warms_up_is_left_out(toy: type[Toy]) -> None:
    compared = _compared(rounds=3)
    assert compared.seconds["pp8"] == {"dotllm": [1.0] * 3, "wheel": [3.0] * 3, "ik": [2.0] * 3}


@pytest.mark.parametrize("broken", ["wheel", "wheel loads"])
def test_an_engine_that_fails_is_left_out_and_said_why(
    toy: type[Toy], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(toy, "broken", (broken,))
    compared = _compared()
    assert set(compared.seconds["tg4"]) == {"dotllm", "ik"}
    assert list(compared.missing) == ["wheel"]
    assert compared.missing["wheel"] in peer_speed.show(compared)


def test_ratios_are_those_within_a_round() -> None:
    seconds = {"pp8": {"dotllm": [1.0, 2.0, 4.0], "ik": [2.0, 1.0, 12.0]}}
    compared = Compared("m.gguf", 10, 2, (PROMPT,), seconds)
    assert compared.ratios(PROMPT, "ik") == [0.5, 2.0, 3.0]
    assert compared.rate(PROMPT, "dotllm") == 4.0
    assert "dotllm x 2.00 (0.50 .. 3.00)" in peer_speed.show(compared)
    (test,) = peer_speed.report(compared)["tests"]
    assert test["engines"]["ik"]["ratio"] == 2.0
    assert "ratio" not in test["engines"]["dotllm"]


def test_a_peer_without_ours_has_no_ratio() -> None:
    compared = Compared("m.gguf", 10, 2, (PROMPT,), {"pp8": {"ik": [1.0]}})
    assert "dotllm x" not in peer_speed.show(compared)


def test_a_real_worker(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engines", "dotllm", "--rounds", "1", "--prompt", "8", "--answer", "2", "--depth", "2", "--json"]
    assert compare_peer.main(["--speed", str(STORY), *arguments, "--threads", "1"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["missing"] == {}
    assert [test["test"] for test in report["tests"]] == ["pp8", "tg2"]
    assert all(test["engines"]["dotllm"]["tok_s"] > 0 for test in report["tests"])


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF and no more")
    with pytest.raises(EngineFailed, match="exit 1"):
        peer_speed.Worker("dotllm", path, 8, 1)


def test_the_native_program_must_be_there() -> None:
    with pytest.raises(SystemExit, match="no such program"):
        peer_speed.native_bench("/no/such/llama-bench")


def test_llama_bench_is_asked_for_one_repetition(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text('#!/bin/sh\necho "$@" > "$0.asked"; echo \'[{"avg_ns": 1500000000}]\'\n')
    program.chmod(0o755)
    with peer_speed.Worker("native", STORY, 16, 2, str(program)) as worker:
        assert worker.seconds(ANSWER) == 1.5
    asked = (tmp_path / "llama-bench.asked").read_text()
    assert f"-m {STORY} -t 2 -fa 1 -r 1 -o json -p 0 -n 4 -d 2" in asked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one MODEL, or --speed"),
        (["m.gguf", "--speed", "m.gguf"], "give one MODEL, or --speed"),
        (["--speed", "m.gguf", "--rounds", "0"], "take 1 or more"),
        (["--speed", "m.gguf", "--prompt", "0", "--answer", "0"], "not both 0"),
        (["--speed", "m.gguf", "--engines", "ours"], "is not a list of"),
    ],
)
def test_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_peer.main(arguments)
    assert said in capsys.readouterr().err
