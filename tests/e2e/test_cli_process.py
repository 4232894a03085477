"""What only a process of its own can show: start-up, signals, closed pipes, terminals."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dotllm.cli.console import Console, bytes_text, rate_text, safe
from dotllm.cli.locate import demo_model
from dotllm.cli.reader import _editor

ROOT = Path(__file__).resolve().parents[2]
RUN = (sys.executable, "-m", "dotllm", "run", "--backend", "numpy", "-n", "-1", "--ignore-eos")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DOTLLM_")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )


def ended(process: subprocess.Popen[bytes]) -> str:
    """Standard error, once it has ended."""
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return err.decode()


def test_help_and_version_load_nothing_slow() -> None:
    code = (
        "import sys\nfrom dotllm.cli.app import main\n"
        "try: main([sys.argv[1]])\nexcept SystemExit as e: assert not e.code\n"
        "print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    for option, words in (("--help", "inspect"), ("--version", "dotllm 0.")):
        command = [sys.executable, "-c", code, option]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
        assert words in done.stdout
        loaded = set(done.stdout.partition("LOADED")[2].split())
        assert "typer" in loaded
        assert not loaded & {"numpy", "numba", "tokenizers", "rich", "jinja2", "prompt_toolkit"}


def test_help_names_what_exists_and_nothing_else() -> None:
    command = [sys.executable, "-m", "dotllm", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    commands = re.findall(r"^  (\w+)  +\w", done.stdout.partition("Commands:")[2], re.M)
    assert commands == ["run", "chat", "bench", "inspect", "tokenize", "logits", "trace"]


def test_ctrl_c_ends_a_run_with_130_and_no_traceback() -> None:
    process = start(*RUN)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    err = ended(process)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_ctrl_c_in_a_callback_of_compiled_code_is_not_lost() -> None:
    code = (
        "import ctypes, os, signal\nfrom dotllm.cli.interrupt import interruptible\n"
        "def callback():\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(9): pass\n"
        "try:\n"
        "    with interruptible():\n"
        "        ctypes.CFUNCTYPE(None)(callback)()\n"
        "        raise RuntimeError('the callback did not do its work')\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_the_second_ctrl_c_kills() -> None:
    code = (
        "import os, signal, time\nfrom dotllm.cli.interrupt import interruptible\n"
        "with interruptible():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "    except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(9)\n"
    )
    process = start(sys.executable, "-c", code)
    ended(process)
    assert process.returncode == -signal.SIGINT


def test_a_reader_that_leaves_early_is_no_error() -> None:
    process = start(*RUN, "-q")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    err = ended(process)
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_standard_streams_may_be_closed_or_full() -> None:
    command = f"{sys.executable} -m dotllm tokenize"
    for redirection, code, words in (
        ("once <&-", 0, "294"),
        ("once >&-", 0, "gives the text back"),
        ("once 2>&-", 0, "294"),
        ("<&- >&- 2>&-", 0, ""),
        ("once > /dev/full", 1, "Error: No space left on device"),
    ):
        line = f"{command} '{demo_model()}' {redirection}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment(), timeout=60)
        assert done.returncode == code, done.stderr
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_piped_text_is_utf8_whatever_the_locale() -> None:
    command = [*RUN[:3], "chat", "--backend", "numpy", "-n", "1", "-q"]
    for locale in ("C", "C.UTF-8"):
        there = environment() | {"LC_ALL": locale}
        done = subprocess.run(command, input=b"caf\xe9\n", capture_output=True, env=there, timeout=60)
        assert done.returncode == 2
        assert b"not UTF-8" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_chat_at_a_terminal(tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    command = (sys.executable, "-m", "dotllm", "chat", "--backend", "numpy", "-n", "3")
    where = {**environment(), "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path), "TERM": "xterm"}
    where["PROMPT_TOOLKIT_NO_CPR"] = "1"
    ready = b"\x1b[?25h"  # the line editor shows the cursor
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=where, start_new_session=True)
    os.close(theirs)
    screen = b""

    def wait_for(words: bytes) -> None:
        nonlocal screen
        limit = time.monotonic() + 30
        while words not in screen:
            assert select.select([ours], [], [], max(0.0, limit - time.monotonic()))[0], (words, screen)
            screen += os.read(ours, 4096)
        screen = screen.partition(words)[2]

    try:
        wait_for(b"Ctrl-D leaves")
        wait_for(ready)
        os.write(ours, b"Once upon a time\r")
        wait_for(b" there lived a")
        wait_for(b"3 generated")
        wait_for(ready)
        os.write(ours, b"half a line\x03/undo\r")
        wait_for(b"taken back: Once upon a time")
        wait_for(ready)
        os.write(ours, b"\x03")
        assert process.wait(60) == 130
    finally:
        process.kill()
        os.close(ours)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.skipif(sys.platform == "win32", reason="sends bytes as a POSIX terminal does")
@pytest.mark.parametrize("kind", ["absent", "file", "folder"])
def test_no_history_and_no_line_ends_a_chat(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if kind == "file":  # in place of the folder that the history lies in
        (tmp_path / "dotllm").write_text("")
    elif kind == "folder":
        (tmp_path / "dotllm" / "chat_history").mkdir(parents=True)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        session = _editor(())
        for line in (b"hello\r", b"caf\xe9\r"):
            keys.send_bytes(line)
            assert session.prompt("> ") == line.rstrip().decode("utf-8", "surrogateescape")
    if kind == "absent":
        assert "+hello" in (tmp_path / "dotllm" / "chat_history").read_text()


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    console.out, console.err = Terminal(), Terminal()
    console.error("bad")
    assert console.err.getvalue() == "\x1b[31mbad\x1b[0m\n"
    console.write("hmm", "dim")
    assert console.out.getvalue() == "\x1b[2mhmm\x1b[0m"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert console.style("x", "red") == "x"
    console.out = io.StringIO()
    assert console.style("x", "red", console.out) == "x"


def test_a_terminal_is_not_steered_by_text() -> None:
    assert safe("a\x1b[2J\x9b\r\tb\n") == "a\\x1b[2J\\x9b\\x0d\tb\n"
    console = Console()
    console.out = Terminal()
    console.write("\x1b]0;title\x07")
    assert "\x1b" not in console.out.getvalue()
    console.out = io.StringIO()
    console.write("\x1b")
    assert console.out.getvalue() == "\x1b"  # a pipe gets the text as it is


def test_numbers_for_people() -> None:
    assert [bytes_text(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]
    assert rate_text(10, 500.0) == "20.0"
    assert rate_text(0, 5.0) == rate_text(3, 0.0) == "-"
