"""`dotllm tokenize`: the token ids of a text, and what each stands for."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from dotllm.cli.console import Console
from dotllm.cli.locate import model_path
from dotllm.cli.options import Json, ModelFlag
from dotllm.cli.reader import read_piped

__all__ = ["tokenize"]


def _names_file(argument: str) -> bool:
    return argument.lower().endswith(".gguf") or os.path.exists(argument)


def tokenize(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A .gguf file; without one, the story model.")
    ] = None,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text; without it, standard input.")] = None,
    model_flag: ModelFlag = None,
    no_special: Annotated[
        bool, typer.Option("--no-special", help="Add no BOS, and read <|...|> as text, not as control tokens.")
    ] = False,
    ids_only: Annotated[bool, typer.Option("--ids", help="Only the ids, with commas.")] = False,
    as_json: Json = False,
) -> None:
    """Show the tokens of a text and check that they give the text back."""
    from dotllm.engine.load import open_tokenizer
    from dotllm.gguf.reader import GGUFFile

    if text is None and model is not None and (model_flag is not None or not _names_file(model)):
        model, text = None, model  # a single argument is the text, unless it names a model
    if text is None:
        text = read_piped()
    console = Console()
    with GGUFFile.open(model_path(model, model_flag)) as file:
        tokenizer = open_tokenizer(file)
        ids = tokenizer.encode(text, add_special=not no_special, parse_special=not no_special)
        pieces = [tokenizer.token_bytes(i, special=True).decode("utf-8", "backslashreplace") for i in ids]
        plain = tokenizer.encode(text, parse_special=not no_special)
        back = tokenizer.decode(plain, special=True)
    whole = back in (text, f" {text}")  # SentencePiece vocabularies put a space before the text
    if as_json:
        tokens = [{"id": i, "piece": piece} for i, piece in zip(ids, pieces, strict=True)]
        console.write(json.dumps({"tokens": tokens, "count": len(ids), "round_trip": whole}, ensure_ascii=False) + "\n")
    elif ids_only:
        console.write(",".join(map(str, ids)) + "\n")
    else:
        for i, piece in zip(ids, pieces, strict=True):
            console.write(f"{i:>8}  {json.dumps(piece, ensure_ascii=False)}\n")
    if not whole:
        console.note("note: decoding the tokens does not give exactly this text back", "yellow")
    elif not as_json and not ids_only:
        console.note(f"{len(ids)} tokens; decoding them gives the text back")
