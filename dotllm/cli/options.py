"""The options of the commands, each written once: flags, help, environment variable and default.

A group is a dataclass; a command takes whole groups as parameters and `takes` spreads them into options of their own.
The environment variable of an option is DOTLLM_ and its first long flag: --ctx-size is DOTLLM_CTX_SIZE.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

__all__ = [
    "GenerateOptions",
    "Json",
    "ModelArgument",
    "ModelFlag",
    "ModelOptions",
    "OutputOptions",
    "SamplingOptions",
    "flag",
    "takes",
]


def flag(*flags: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    """An option whose environment variable follows from its first long flag."""
    long = next(f for f in flags if f.startswith("--")).split("/")[0]
    name = "DOTLLM_" + long.removeprefix("--").replace("-", "_").upper()
    return typer.Option(*flags, help=help, metavar=metavar, envvar=name, show_envvar=False, **more)


ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A .gguf file. Without one: the story model that comes with dotllm."),
]
ModelFlag = Annotated[
    str | None, typer.Option("-m", "--model", metavar="MODEL", help="The same as the argument MODEL.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else there.")]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded and run."""

    ctx_size: Annotated[
        int | None,
        flag("-c", "--ctx-size", "--max-model-len", metavar="N", help="Context in tokens; 0 = the model's own."),
    ] = None
    threads: Annotated[
        int | None, flag("-t", "--threads", metavar="N", help="Threads (one per physical core if not given).")
    ] = None
    cache_type_k: Annotated[str, flag("-ctk", "--cache-type-k", metavar="f32|f16", help="Type of cached keys.")] = "f16"
    cache_type_v: Annotated[str, flag("-ctv", "--cache-type-v", metavar="f32|f16", help="Type of cached values.")] = (
        "f16"
    )
    ubatch_size: Annotated[
        int, flag("-ub", "--ubatch-size", metavar="N", help="Prompt tokens that are computed at once.")
    ] = 512
    backend: Annotated[str, flag("--backend", "--device", metavar="cpu|numpy", help="What computes.")] = "cpu"
    no_mtp: Annotated[
        bool, flag("--no-mtp", help="Do not draft with the file's MTP head; this version never does.")
    ] = False


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen."""

    seed: Annotated[int, flag("-s", "--seed", metavar="N", help="Seed of the sampler; -1 draws one.")] = -1
    temp: Annotated[
        float, flag("--temp", "--temperature", metavar="T", help="Temperature; 0 takes the likeliest token.")
    ] = 0.0
    top_k: Annotated[int, flag("--top-k", metavar="N", help="Only the N likeliest tokens; 0 = all.")] = 0
    top_p: Annotated[float, flag("--top-p", metavar="P", help="Only the likeliest tokens that sum to P.")] = 1.0
    min_p: Annotated[float, flag("--min-p", metavar="P", help="Only tokens with P times the peak's probability.")] = 0.0
    repeat_penalty: Annotated[
        float, flag("--repeat-penalty", metavar="X", help="Makes tokens seen before less likely; 1 = off.")
    ] = 1.0
    repeat_last_n: Annotated[
        int, flag("--repeat-last-n", metavar="N", help="Tokens that penalties look back on; -1 = all, 0 = off.")
    ] = 64
    presence_penalty: Annotated[
        float, flag("--presence-penalty", metavar="X", help="Subtracted from logits of tokens seen before.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, flag("--frequency-penalty", metavar="X", help="Subtracted for each time a token was seen.")
    ] = 0.0
    logit_bias: Annotated[
        list[str],
        flag("--logit-bias", metavar="ID+BIAS", help="Add to a token's logit: 15043+1, 15043-1, 15043-inf."),
    ] = field(default_factory=list)
    top_logprobs: Annotated[
        int | None, flag("--top-logprobs", metavar="N", help="Report log probabilities: of the N likeliest tokens too.")
    ] = None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the text starts from, and where it ends."""

    system: Annotated[
        str | None, flag("-sys", "--system", "--system-prompt", metavar="TEXT", help="System prompt.")
    ] = None
    raw: Annotated[bool, flag("--raw", help="Send the text as it is: no chat template.")] = False
    chat_template_file: Annotated[
        Path | None, flag("--chat-template-file", metavar="FILE", help="A Jinja chat template in place of the file's.")
    ] = None
    ignore_eos: Annotated[bool, flag("--ignore-eos", help="Go on after the end-of-text token.")] = False
    reverse_prompt: Annotated[
        list[str], flag("-r", "--reverse-prompt", "--stop", metavar="TEXT", help="Stop before this text; repeatable.")
    ] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How much is said on standard error."""

    verbose: Annotated[bool, flag("-v", "--verbose", help="Log what happens; errors with their traceback.")] = False
    quiet: Annotated[bool, flag("-q", "--quiet", help="Nothing on standard error but errors.")] = False


def takes(command: Callable[..., None]) -> Callable[..., None]:
    """A command of flat options, from one whose parameters may be groups of them."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]) and isinstance(hints[name], type):
            groups[name] = hints[name]
            for option in _options(hints[name]):
                parameters[option.name] = option
        else:
            parameters[name] = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        built = {
            name: group(**{part.name: given.pop(part.name) for part in fields(group)}) for name, group in groups.items()
        }
        command(**built, **given)

    flat.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    vars(flat)["__signature__"] = inspect.Signature(list(parameters.values()))
    return flat


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    options = []
    for part in fields(group):
        default = part.default if part.default_factory is MISSING else part.default_factory()
        options.append(
            inspect.Parameter(part.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[part.name])
        )
    return options
