"""Where the prompt of `run` comes from: an option, an argument, a file, standard input, or the user at the terminal."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dotllm.cli.console import Console
from dotllm.cli.reader import read_piped
from dotllm.errors import UsageError

if TYPE_CHECKING:
    from dotllm.cli.options import GenerateOptions
    from dotllm.cli.session import Session

__all__ = ["DEMO_PROMPT", "RunPrompt", "find_prompt", "read_text", "run_prompt", "token_limit"]

DEMO_PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class RunPrompt:
    """A prompt as tokens; `template` says what was applied. `verbatim`: the model goes on from the very text."""

    tokens: tuple[int, ...]
    template: str
    verbatim: bool


def run_prompt(session: Session, text: str, options: GenerateOptions) -> RunPrompt:
    """The tokens of a prompt: through the chat template if there is one and --raw is not given."""
    from dotllm.cli.format import template_format

    chat_format = None if options.raw else template_format(session.file, session.tokenizer, options.chat_template_file)
    if chat_format is not None:
        messages = [{"role": "system", "content": options.system}] if options.system else []
        prompt = chat_format.prompt([*messages, {"role": "user", "content": text}])
        return RunPrompt(prompt.tokens, chat_format.note, verbatim=False)
    if options.system is not None:
        why = "--raw sends none" if options.raw else "this model has none"
        raise UsageError(f"--system needs a chat template, and {why}")
    tokens = session.tokenizer.encode(text, add_special=True)
    return RunPrompt(tuple(tokens), "none (--raw)" if options.raw else "none in the file: raw text", verbatim=True)


def token_limit(count: int) -> int | None:
    """The most tokens of a reply; None is until the model stops or the context ends."""
    if count < -1 or count == 0:
        raise UsageError(f"--n-predict is {count}; it must be at least 1, or -1 for no limit")
    return None if count == -1 else count


def find_prompt(console: Console, *, text: str | None, argument: str | None, file: Path | None, demo: bool) -> str:
    """The prompt. Raises UsageError if it is given twice, or not at all where nobody can be asked."""
    given = [source for source in (text, argument, file) if source is not None]
    if len(given) > 1:
        raise UsageError("the prompt is given twice: use one of -p TEXT, the argument PROMPT and -f FILE")
    if file is not None:
        return read_text(file).removesuffix("\n")
    if given:
        return str(given[0])
    if "DOTLLM_PROMPT" in os.environ:
        return os.environ["DOTLLM_PROMPT"]
    if "DOTLLM_FILE" in os.environ:
        return read_text(Path(os.environ["DOTLLM_FILE"])).removesuffix("\n")
    if not sys.stdin.isatty():
        piped = read_piped().removesuffix("\n")
        if piped:
            return piped
    if demo:
        return DEMO_PROMPT
    if not sys.stdin.isatty():
        raise UsageError("there is no prompt: give it with -p TEXT, -f FILE, or on standard input")
    console.err.write("Prompt: ")
    console.err.flush()
    typed = sys.stdin.readline().rstrip("\n")
    if not typed:
        raise UsageError("the prompt is empty")
    return typed


def read_text(path: Path) -> str:
    """A text file in UTF-8. Raises UsageError."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text: {error}") from error
