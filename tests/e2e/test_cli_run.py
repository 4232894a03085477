"""`dotllm run`: what is on standard output, what is not, where prompts come from, and exit codes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from commands import Run

from dotllm.cli import session
from dotllm.cli.console import Console
from dotllm.cli.locate import demo_model

if TYPE_CHECKING:
    from dotllm.engine.engine import Engine
    from dotllm.ops.protocol import Ops

NUMPY = ("--backend", "numpy")
CHATML = """\
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_without_arguments_the_story_model_tells_a_story(cli: Run) -> None:
    result = cli("run", *NUMPY, "-n", "4")
    assert result.code == 0
    assert result.out == " there lived a king\n"
    header, model, mtp, *panel = result.err.splitlines()
    assert header == "dotllm | qwen35 8L/4H | Q8_0 | numpy | greedy | context 2048 of the model's 2048"
    assert "dotLLM Story 5M" in model
    assert "raw text" in model
    assert "MTP: head present" in mtp
    names = [line.split()[0] for line in panel if line]
    assert names == ["prefill", "decode", "sampling", "total", "load", "memory", "length:"]
    assert "4 prompt tokens, 4 generated" in result.err
    assert "\x1b" not in result.err


def test_quiet_leaves_the_text_alone(cli: Run) -> None:
    assert cli("run", *NUMPY, "-q", "-n", "2").err == ""


@pytest.mark.parametrize("way", ["-p", "argument", "-f", "stdin", "-m", "DOTLLM_PROMPT"])
def test_a_prompt_can_come_from_anywhere(cli: Run, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, model = "The old king said", str(demo_model())
    (tmp_path / "prompt.txt").write_text(prompt + "\n")
    monkeypatch.setenv("DOTLLM_N_PREDICT", "2")
    if way == "DOTLLM_PROMPT":
        monkeypatch.setenv(way, prompt)
    arguments = {
        "-p": ("-p", prompt),
        "argument": (model, prompt),
        "-f": ("-f", str(tmp_path / "prompt.txt")),
        "-m": ("-m", model, prompt),
    }.get(way, ())
    result = cli("run", *NUMPY, "--json", *arguments, stdin=prompt + "\n" if way == "stdin" else "")
    report = json.loads(result.out)
    assert report["prompt"] == prompt
    assert report["usage"] == {"prompt_tokens": 4, "generated_tokens": 2, "cached_tokens": 0}


def test_json_has_every_field_and_nothing_stands_beside_it(cli: Run) -> None:
    result = cli("run", *NUMPY, "--json", "-n", "3", "--top-logprobs", "2")
    report = json.loads(result.out)
    assert report["text"] == " there lived a"
    assert report["architecture"] == "qwen35"
    assert report["model"] == "dotLLM Story 5M"
    assert report["finish_reason"] == "length"
    assert set(report["timings"]) == {
        *("load_ms", "prefill_ms", "decode_ms", "sampling_ms", "total_ms", "prefill_tok_s", "decode_tok_s"),
        *("generated_tokens", "speculative_draft_tokens", "speculative_accepted_tokens", "speculative_acceptance_rate"),
    }
    memory = report["memory"]
    assert memory["weights_bytes"] == demo_model().stat().st_size
    assert memory["kv_cache_bytes"] > 0
    assert memory["recurrent_state_bytes"] > 0
    assert memory["total_bytes"] == sum(size for name, size in memory.items() if name != "total_bytes")
    assert len(report["tokens"]) == 3
    first = report["logprobs"][0]
    assert first["id"] == report["tokens"][0] == first["top_logprobs"][0]["id"]  # greedy takes the likeliest
    assert bytes(first["bytes"]).decode() == first["token"] == " there"
    assert 0 > first["logprob"] == first["top_logprobs"][0]["logprob"] > first["top_logprobs"][1]["logprob"]


def test_a_seed_decides_the_words(cli: Run) -> None:
    def words(seed: int) -> str:
        return cli("run", *NUMPY, "-q", "-n", "6", "--temp", "2", "-s", str(seed)).out

    assert words(1) == words(1) != words(2)


def test_stop_strings_bias_and_penalties_reach_the_sampler(cli: Run) -> None:
    stopped = json.loads(cli("run", *NUMPY, "--json", "-n", "9", "-r", " king", "--stop", "xyz").out)
    assert (stopped["text"], stopped["finish_reason"]) == (" there lived a", "stop")
    first = stopped["tokens"][0]
    biased = json.loads(cli("run", *NUMPY, "--json", "-n", "1", "--logit-bias", f"{first}-inf").out)
    assert biased["tokens"][0] != first
    pushed = json.loads(cli("run", *NUMPY, "--json", "-n", "1", "--logit-bias", "7+1000").out)
    assert pushed["tokens"] == [7]
    again = json.loads(
        cli("run", *NUMPY, "--json", "-n", "3", "--logit-bias", "7+1000", "--repeat-penalty", "1000000").out
    )
    assert again["tokens"][1:] != [7, 7]


def test_a_template_frames_the_prompt_and_user_text_stays_text(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(CHATML)
    use = ("--chat-template-file", str(path), "--json", "-n", "1")

    def prompt_tokens(*arguments: str) -> int:
        result = cli("run", *NUMPY, *arguments)
        assert result.code == 0, result.err
        return int(json.loads(result.out)["usage"]["prompt_tokens"])

    plain = prompt_tokens(*use, "-p", "Hi")
    assert "template: " + str(path) in cli("run", *NUMPY, *use, "-p", "Hi").err
    assert prompt_tokens(*use, "-p", "Hi", "--raw") < plain < prompt_tokens(*use, "-p", "Hi", "-sys", "Be good")
    # as text the control token is many tokens, sent raw it is one
    assert prompt_tokens(*use, "-p", "<|im_end|>") > plain + 1
    assert prompt_tokens("--json", "-n", "1", "-p", "<|im_end|>", "--raw") == 1


def test_bad_usage_is_2_and_says_what_to_do(cli: Run, tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    other = str(tiny_gguf("llama", "F32"))
    cases = {
        ("no/repository",): "pull",
        ("-p", "a", "-f", str(tmp_path / "b")): "twice",
        ("-f", str(tmp_path / "absent")): "cannot be read",
        (other,): "there is no prompt",
        (other, "-m", other, "-p", "x"): "twice",
        (100 * "Once upon a time ",): "use -p TEXT",
        ("-n", "0"): "--n-predict",
        ("--top-logprobs", "1"): "--json",
        ("-ctk", "f32"): "both",
        ("-ctk", "q8_0"): "--cache-type-k",
        ("-ub", "0"): "--ubatch-size",
        ("-c", "-1"): "context",
        ("--temp", "-1"): "temperature",
        ("--logit-bias", "x"): "--logit-bias",
        ("--logit-bias", "99999+1"): "99999",
        ("-sys", "Be good"): "template",
        ("--backend", "abacus"): "abacus",
        ("--no-such-option",): "--no-such-option",
    }
    for arguments, words in cases.items():
        result = cli("run", *NUMPY, *arguments)
        assert (result.code, result.out) == (2, ""), arguments
        assert words in result.err, arguments
        assert "Traceback" not in result.err
    assert cli("run", *NUMPY, "-p", "x", stdin=b"").code == 0
    assert cli("run", *NUMPY, stdin=b"\xff\xfe").code == 2


def test_other_failures_have_codes_of_their_own(cli: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(20))
    for path in (bad, tmp_path / "absent.gguf", tmp_path):
        result = cli("run", *NUMPY, str(path), "-p", "x")
        assert result.code == 3
        assert result.err.startswith("Error: ")
        assert str(path) in result.err
    assert cli("run", *NUMPY, "-c", "4", "-p", "Once upon a time").code == 1
    large = cli("run", *NUMPY, "-c", "1000000000")
    assert large.code == 4
    assert "smaller context" in large.err
    assert "trained for 2048" in cli("run", *NUMPY, "-c", "2049", "-n", "1").err


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode elsewhere")
def test_a_file_may_have_any_name(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "st\udce9ry \U0001f389.gguf"
    path.symlink_to(demo_model())
    assert cli("run", *NUMPY, str(path), "-p", "Once upon a time", "-n", "2").out == " there lived\n"


def test_the_model_can_come_from_the_environment(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOTLLM_MODEL", str(tmp_path / "absent.gguf"))
    monkeypatch.setenv("DOTLLM_N_PREDICT", "2")
    assert cli("run", *NUMPY).code == 3
    assert cli("run", *NUMPY, str(demo_model()), "-p", "Once upon a time").out == " there lived\n"


def test_whoever_waits_for_kernels_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[tuple[int, ...]] = []

    def slow(engine: object, counts: tuple[int, ...]) -> None:
        rows.append(counts)
        time.sleep(0.1)

    class Compiled:
        name = "compiled"

    compiled = False

    @contextmanager
    def compiling(ops: object) -> Iterator[Callable[[], bool]]:
        yield lambda: compiled

    monkeypatch.setattr("dotllm.engine.load.warm_up", slow)
    monkeypatch.setattr("dotllm.ops.select.compiling", compiling)
    engine, ops = cast("Engine", None), cast("Ops", Compiled())
    session._warm_up(engine, ops, 64, Console(), small=False)
    assert (rows, capsys.readouterr().err) == ([(2,)], "")
    session._warm_up(engine, ops, 4, Console(), small=True)  # a longer prompt than the first may want other kernels
    assert rows[1:] == [(2,), (1, 4)]
    monkeypatch.setattr(session, "SLOW_SECONDS", 0.01)
    session._warm_up(engine, ops, 4, Console(), small=False)
    assert (rows.pop(), capsys.readouterr().err) == ((2,), "")  # slow, but not because something is compiled
    compiled = True
    session._warm_up(engine, ops, 64, Console(), small=False)
    assert rows[3:] == [(2,), (1, 64)]
    assert "compiling kernels" in capsys.readouterr().err


def test_a_short_prompt_alone_needs_few_kernels(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    monkeypatch.setattr(session, "_warm_up", lambda engine, ops, most, console, *, small: rows.append(most))
    cli("run", *NUMPY, "-n", "1", "-p", "Once upon a time")
    cli("run", *NUMPY, "-n", "1", "-p", "so " * 100)
    assert rows == [4, session.MANY_ROWS]


def test_verbose_shows_where_an_error_is_from(cli: Run) -> None:
    assert "Traceback" in cli("run", *NUMPY, "-v", "-c", "4", "-p", "Once upon a time").err


def test_an_error_that_nobody_foresaw_is_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("dotllm.engine.engine.Engine.step", broken)
    result = cli("run", *NUMPY)
    assert result.code == 1
    assert "internal error: ZeroDivisionError: a fault" in result.err
    assert "Traceback" not in result.err
