"""`dotllm inspect`: what is in a model file, without loading it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dotllm.cli.console import Console, bytes_text
from dotllm.cli.locate import model_path
from dotllm.cli.options import Json, ModelArgument, ModelFlag
from dotllm.errors import ModelFileError, UsageError

if TYPE_CHECKING:
    from dotllm.gguf.hparams import ModelConfig
    from dotllm.gguf.reader import GGUFFile, Tensor

__all__ = ["inspect", "parameters"]

_SHOWN = 8  # elements of an array
_WIDTH = 160  # characters of a string


def inspect(
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="Show long arrays and strings whole.")] = False,
    filter: Annotated[
        str | None,
        typer.Option("--filter", metavar="REGEX", help="Only keys and tensors whose names match; lists tensors."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a model file: configuration, metadata, tensors, types, MTP head."""
    from dotllm.gguf.reader import GGUFFile

    wanted = _pattern(filter)
    with GGUFFile.open(model_path(model, model_flag)) as file:
        config, problem = _config(file)
        chosen = [t for t in file.tensors.values() if wanted.search(t.name)] if filter or tensors or as_json else []
        keys = [key for key in sorted(file.metadata) if wanted.search(key)]
        console = Console()
        if as_json:
            report = _report(file, config, problem, keys, chosen, whole=metadata)
            console.write(json.dumps(report, ensure_ascii=False, allow_nan=False) + "\n")
            return
        for line in _lines(file, config, problem, keys, chosen, whole=metadata):
            console.write(line + "\n")


def _pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or "")
    except re.error as error:
        raise UsageError(f"--filter {text!r} is not a regular expression: {error}") from error


def _config(file: GGUFFile) -> tuple[ModelConfig | None, str]:
    """The configuration, or why there is none: a file that cannot be run can still be looked at."""
    from dotllm.gguf.hparams import ModelConfig

    try:
        return ModelConfig.from_gguf(file), ""
    except ModelFileError as error:
        return None, str(error)


def _mtp(config: ModelConfig | None) -> str:
    if config is None:
        return "unknown"
    return "yes" if config.mtp is not None else f"no ({config.mtp_note})"


def _abbreviated(value: Any, *, whole: bool) -> Any:
    """A value for printing: arrays as lists, long ones with their count in place of the rest."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, list):
        if whole or len(items) <= _SHOWN:
            return items
        return [*(_abbreviated(item, whole=False) for item in items[:_SHOWN]), f"... {len(items)} in all"]
    if isinstance(items, str) and len(items) > _WIDTH and not whole:
        return f"{items[:_WIDTH]}... ({len(items)} characters)"
    if isinstance(items, float) and items - items != 0:  # JSON has no infinity and no NaN
        return str(items)
    return items


def _totals(file: GGUFFile) -> list[tuple[str, int, int]]:
    """(type, tensors, bytes), largest first."""
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for tensor in file.tensors.values():
        count[tensor.type.name] += 1
        size[tensor.type.name] += len(tensor.data)
    return [(name, count[name], size[name]) for name, _ in size.most_common()]


def parameters(file: GGUFFile) -> int:
    """How many numbers the tensors of a file hold."""
    return sum(tensor.rows * tensor.shape[-1] for tensor in file.tensors.values())


def _report(
    file: GGUFFile, config: ModelConfig | None, problem: str, keys: list[str], chosen: list[Tensor], *, whole: bool
) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "version": file.version,
        "alignment": file.alignment,
        "size": file.size,
        "shards": [str(path) for path in file.shards],
        "parameters": parameters(file),
        "metadata": {key: _abbreviated(file.metadata[key], whole=whole) for key in keys},
        "config": None if config is None else dataclasses.asdict(config),
        "problem": problem or None,
        "mtp_head": config is not None and config.mtp is not None,
        "mtp_note": None if config is None else config.mtp_note,
        "types": {name: {"tensors": count, "bytes": size} for name, count, size in _totals(file)},
        "tensors": [
            {"name": t.name, "type": t.type.name, "shape": list(t.shape), "bytes": len(t.data)} for t in chosen
        ],
    }


def _lines(
    file: GGUFFile, config: ModelConfig | None, problem: str, keys: list[str], chosen: list[Tensor], *, whole: bool
) -> Iterator[str]:
    shards = f" in {len(file.shards)} shards" if len(file.shards) > 1 else ""
    yield f"{Path(file.path).name}: GGUF version {file.version}, {bytes_text(file.size)}{shards}, " + (
        f"{len(file.tensors)} tensors, {parameters(file) / 1e6:.2f} M parameters"
    )
    yield ""
    if config is None:
        yield f"Not a model that can be run: {problem}"
    else:
        yield from _config_lines(config)
    yield f"  {'MTP head':<18} {_mtp(config)}"
    yield ""
    yield "Metadata"
    for key in keys:
        yield f"  {key} = {json.dumps(_abbreviated(file.metadata[key], whole=whole), ensure_ascii=False)}"
    yield ""
    yield "Types"
    for name, count, size in _totals(file):
        yield f"  {name:<8} {count:>5} tensors  {bytes_text(size):>12}"
    if chosen:
        yield ""
        yield "Tensors"
        width = max(len(tensor.name) for tensor in chosen)
        for t in chosen:
            shape = " x ".join(map(str, t.shape))
            yield f"  {t.name:<{width}}  {t.type.name:<7} {shape:>18}  {bytes_text(len(t.data)):>12}"


def _config_lines(config: ModelConfig) -> Iterator[str]:
    kinds = Counter(layer.kind for layer in config.layers)
    attention = next((layer for layer in config.layers if layer.kind == "attention"), None)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    rows = {
        "architecture": config.architecture,
        "name": config.name,
        "quantisation": config.file_type,
        "context": config.context_length,
        "embedding": config.embedding_length,
        "vocabulary": f"{config.vocab_size}{', output tied to embedding' if config.tied_output else ''}",
        "layers": f"{len(config.layers)} ({layers})",
    }
    if attention is not None:
        gate = ", gated" if config.gated_attention else ""
        rows["attention"] = f"{attention.heads} heads, {attention.kv_heads} for keys and values, of {config.head_dim}"
        rows["attention"] = f"{rows['attention']}{gate}"
    if (r := config.recurrent) is not None:
        rows["recurrent"] = f"{r.v_heads} value heads, {r.k_heads} key heads of {r.state_size}, {r.conv_kernel} taps"
    if (e := config.experts) is not None:
        rows["experts"] = f"{e.used} of {e.count}, of {e.feed_forward_length}; shared {e.shared_feed_forward_length}"
    yield "Configuration"
    for name, value in rows.items():
        yield f"  {name:<18} {value}"
