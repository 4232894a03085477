"""Lines from the user: with editing and history on a terminal, plain lines from a pipe; several lines make one message.

hello                     one message
first line \\              a backslash at the end: the message goes on
\"\"\"first line            until the next \"\"\"
Alt-Enter                 a new line, on a terminal
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dotllm.cli.console import Console
from dotllm.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

__all__ = ["ReadLine", "line_reader", "read_message", "read_piped"]

ReadLine = Callable[[str], str]
"""Shows a prompt and returns a line without its end; EOFError at the end of input."""

_FENCE = '"""'


def line_reader(console: Console, commands: tuple[str, ...]) -> ReadLine:
    """A line editor if the user sits at a terminal, else lines of standard input."""
    if not console.interactive:
        return _piped_line
    session = _editor(commands)
    return lambda prompt: session.prompt(prompt)


def read_message(read: ReadLine, prompt: str) -> str:
    """One message, of several lines if the first asks for more. EOFError at the end of input."""
    line = read(prompt)
    if line.lstrip().startswith(_FENCE):
        return _fenced(read, line.lstrip()[len(_FENCE) :])
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read("... "))
        except EOFError:
            break
    return "\n".join(lines).strip()


def _fenced(read: ReadLine, line: str) -> str:
    lines = []
    while _FENCE not in line:
        lines.append(line)
        try:
            line = read("... ")
        except EOFError:
            break
    else:
        lines.append(line[: line.index(_FENCE)])
    return "\n".join(lines).strip("\n")


def read_piped() -> str:
    """All of standard input as text. Raises UsageError if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: {error}") from error


def _piped_line(prompt: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: {error}") from error
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _editor(commands: tuple[str, ...]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    class History(FileHistory):
        """A file that cannot be read or written, or a line that has no UTF-8 form, is no reason to end a chat."""

        def load_history_strings(self) -> list[str]:
            try:
                return list(super().load_history_strings())
            except OSError:
                return []

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError, UnicodeEncodeError):
                super().store_string(string)

    try:
        history: FileHistory | InMemoryHistory = History(_history_file())
    except OSError:
        history = InMemoryHistory()
    completer = WordCompleter(list(commands), sentence=True)
    return PromptSession(history=history, key_bindings=keys, completer=completer, complete_while_typing=False)


def _history_file() -> str:
    """Where lines are kept between chats; readable by the user alone."""
    from platformdirs import user_state_path

    folder = user_state_path("dotllm", appauthor=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "chat_history"
    path.touch(mode=0o600, exist_ok=True)
    return str(path)
