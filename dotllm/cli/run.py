"""`dotllm run`: one prompt, one answer."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dotllm.cli.console import Console, set_log_level
from dotllm.cli.locate import is_demo, model_path
from dotllm.cli.options import (
    GenerateOptions,
    Json,
    ModelArgument,
    ModelFlag,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    flag,
)
from dotllm.cli.prompt import find_prompt, run_prompt, token_limit
from dotllm.cli.report import header_lines, json_report, statistics_lines
from dotllm.cli.session import Session, open_session, sampling_params
from dotllm.errors import DotLLMError, UsageError

if TYPE_CHECKING:
    from dotllm.engine.request import Event, Request

__all__ = ["answer_events", "run"]


def run(
    model: ModelArgument = None,
    prompt_text: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The same as -p.")] = None,
    model_flag: ModelFlag = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt; or pipe it in, or -f FILE.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from a file.")
    ] = None,
    n_predict: Annotated[
        int, flag("-n", "--n-predict", "--predict", "--max-tokens", metavar="N", help="Most tokens; -1 = no limit.")
    ] = 128,
    as_json: Json = False,
    *,
    how: ModelOptions,
    sampling: SamplingOptions,
    generate: GenerateOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt. Without a model and a prompt, the story model tells a story."""
    from dotllm.engine.request import Request

    console = Console(quiet=output.quiet)
    set_log_level(verbose=output.verbose, quiet=output.quiet)
    if model_flag is not None and model is not None and prompt_text is None:
        model, prompt_text = None, model  # with --model, a single argument is the prompt
    if sampling.top_logprobs is not None and not as_json:
        raise UsageError("--top-logprobs needs --json: log probabilities are part of that report")
    path = model_path(model, model_flag)
    params, limit = sampling_params(sampling), token_limit(n_predict)
    text = find_prompt(console, text=prompt, argument=prompt_text, file=file, demo=is_demo(path))
    with open_session(path, how, console, prompt=text) as session:
        rendered = run_prompt(session, text, generate)
        for line in header_lines(session, params, rendered.template):
            console.note(line, "dim")
        request = Request(
            prompt=rendered.tokens,
            sampling=params,
            max_tokens=limit,
            stop=tuple(generate.reverse_prompt),
            ignore_eos=generate.ignore_eos,
        )
        if as_json:
            report = json_report(session, text, list(answer_events(session, request)))
            console.write(json.dumps(report, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            _stream(console, session, request, echo=text if rendered.verbatim else "")


def answer_events(session: Session, request: Request) -> Generator[Event]:
    """The events of a request; an answer that ends with an error raises it."""
    with closing(cast("Generator[Event]", session.engine.generate(request))) as events:
        for event in events:
            if event.error is not None:
                raise event.error
            yield event


def _stream(console: Console, session: Session, request: Request, *, echo: str) -> None:
    if echo and console.out.isatty() and console.err.isatty():
        console.err.write(console.style(echo, "bold"))
        console.err.flush()
    shown, last = "", None
    try:
        for event in answer_events(session, request):
            if event.text:
                console.write(event.text)
                shown = event.text
            last = event
    finally:
        if shown and not shown.endswith("\n"):
            console.write("\n")
    if last is None:
        raise DotLLMError("the engine gave no answer")
    console.note("")
    for line in statistics_lines(session, last):
        console.note(line, "dim")
