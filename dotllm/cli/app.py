"""The `dotllm` command: its subcommands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dotllm import __version__
from dotllm.cli.bench import bench
from dotllm.cli.chat import chat
from dotllm.cli.console import Console
from dotllm.cli.inspect import inspect
from dotllm.cli.interrupt import interruptible
from dotllm.cli.logits import logits
from dotllm.cli.options import takes
from dotllm.cli.run import run
from dotllm.cli.tokenize import tokenize
from dotllm.cli.trace import trace
from dotllm.errors import DotLLMError

__all__ = ["main"]

INTERRUPTED = 130

_EPILOG = (
    "Every option has an environment variable: DOTLLM_ and its long name, as DOTLLM_CTX_SIZE for --ctx-size. "
    "Standard output carries the model's text alone. Exit codes: 0 done, 1 failure, 2 usage, 3 bad or unsupported "
    "model file, 4 does not fit in memory, 5 backend unavailable, 130 interrupted."
)


class Commands(TyperGroup):
    """Runs a command; what goes wrong in it becomes one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        logger = logging.getLogger("dotllm")
        try:
            with _errors(), interruptible():
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        finally:  # a process that calls `main` keeps its own logging
            logger.handlers = []
            logger.setLevel(logging.NOTSET)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except DotLLMError as error:
        _report(str(error))
        raise typer.Exit(error.exit_code) from error
    except MemoryError as error:
        _report(f"out of memory{f': {error}' if str(error) else ''}; try a smaller --ctx-size or a smaller model")
        raise typer.Exit(4) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OSError as error:  # a full disk, a device that is gone: not ours, so not "internal"
        _report(f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror or error}")
        raise typer.Exit(1) from error
    except Exception as error:
        if isinstance(error, typer.Abort) or hasattr(error, "exit_code"):  # typer's own: bad usage, --help, --version
            raise
        _report(f"internal error: {type(error).__name__}: {error} (-v shows where; please report it)")
        raise typer.Exit(1) from error


def _report(message: str) -> None:
    console = Console()
    console.error(f"Error: {message}")
    if logging.getLogger("dotllm").isEnabledFor(logging.DEBUG):
        import traceback

        console.note(traceback.format_exc())


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"dotllm {__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Run GGUF language models in pure Python."""


def _application() -> typer.Typer:
    app = typer.Typer(
        cls=Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich takes longer to import than the rest of `dotllm --help`
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        epilog=_EPILOG,
    )
    app.callback()(_root)
    for command in (run, chat, bench, inspect, tokenize, logits, trace):
        app.command(command.__name__)(takes(command))
    app.command("show", hidden=True)(takes(inspect))
    return app


def _streams() -> None:
    """Make the standard streams what commands take them for."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # as files are read, whatever the locale


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `dotllm` command; `arguments` in place of those of the process. Ends with SystemExit."""
    _streams()
    _application()(arguments, prog_name="dotllm")
