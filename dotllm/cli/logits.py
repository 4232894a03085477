"""`dotllm logits`: the logits of every position of a text, as a .npy file: what other engines are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dotllm.cli.console import Console
from dotllm.cli.locate import model_path
from dotllm.cli.options import ModelArgument, ModelFlag, flag
from dotllm.errors import DotLLMError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dotllm.models.base import Model
    from dotllm.ops.protocol import Array, KvLayer, Ops, Rows
    from dotllm.state.manager import StateManager

__all__ = ["logits"]

_SLICE_BYTES = 64 << 20  # of logits that are in memory at once


def logits(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.npy", help="Where to write float32 (tokens, vocabulary).")
    ],
    model: ModelArgument = None,
    model_flag: ModelFlag = None,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="1,2,3", help="Token ids.")] = None,
    text: Annotated[str | None, typer.Option("--text", metavar="TEXT", help="Text, tokenized as a prompt.")] = None,
    mtp: Annotated[
        bool, typer.Option("--mtp", help="Of the MTP head: row i sees token i and the hidden row before it.")
    ] = False,
    backend: Annotated[str, flag("--backend", "--device", metavar="cpu|numpy", help="What computes.")] = "cpu",
    chunk: Annotated[int, typer.Option("--chunk", metavar="N", help="Tokens that are computed at once.")] = 512,
    threads: Annotated[int | None, flag("-t", "--threads", metavar="N", help="Threads.")] = None,
) -> None:
    """Write the logits of every position to a .npy file (keys and values in float32)."""
    from dotllm.engine.load import open_tokenizer
    from dotllm.gguf.reader import GGUFFile
    from dotllm.models.registry import load_model
    from dotllm.ops.select import select_ops

    if (tokens is None) == (text is None):
        raise UsageError("give either --tokens or --text")
    if chunk < 1:
        raise UsageError(f"--chunk is {chunk}; it must be at least 1")
    with GGUFFile.open(model_path(model, model_flag)) as file:
        ids = _parse(tokens) if tokens is not None else open_tokenizer(file).encode(text or "", add_special=True)
        if not ids:
            raise UsageError("there are no tokens to compute logits for")
        ops = select_ops(backend, threads)
        loaded = load_model(file, ops, context=len(ids))
        if mtp and loaded.mtp is None:
            raise UsageError(f"{file.path}: --mtp was asked for, but: {loaded.config.mtp_note}")
        beyond = [i for i in ids if not 0 <= i < loaded.config.vocab_size]
        if beyond:
            raise UsageError(f"token {beyond[0]} is not in the vocabulary of {loaded.config.vocab_size}")
        with _array(out, len(ids), loaded.config.vocab_size) as array:
            _fill(array, loaded, ops, ids, chunk, mtp=mtp)
    Console().note(f"{out}: {len(ids)} x {loaded.config.vocab_size} float32")


def _parse(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--tokens {text!r}: token ids are whole numbers with commas between them") from None


@contextmanager
def _array(path: Path, rows: int, width: int) -> Iterator[NDArray[np.float32]]:
    """A .npy file as an array that is written through, so that it need not fit in memory."""
    from numpy.lib.format import open_memmap

    try:
        array = open_memmap(path, mode="w+", dtype="float32", shape=(rows, width))
    except OSError as error:
        raise DotLLMError(f"{path}: cannot be written: {error}") from error
    yield array
    array.flush()


def _fill(out: NDArray[np.float32], model: Model, ops: Ops, tokens: list[int], chunk: int, *, mtp: bool) -> None:
    from dotllm.batch import Batch
    from dotllm.state.blocks import pages_for
    from dotllm.state.layout import StateLayout
    from dotllm.state.manager import Extend, StateManager

    rows = max(1, _SLICE_BYTES // (4 * out.shape[1]))
    chunk = min(chunk, rows) if mtp else chunk  # the head computes the logits of a whole chunk
    layout = StateLayout.of(model.config)
    state = StateManager(ops, layout, pages=pages_for(len(tokens)), sequences=1, cache_type="f32", mtp=mtp)
    sequence = state.open()
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        with state.begin([Extend(sequence, len(part))]) as step:
            hidden = model.forward(Batch.build([part], [start], [0]), step)
            if not mtp:
                _main_rows(out[start : start + len(part)], model, ops, hidden, rows)
            step.commit([len(part)], hidden)
        if mtp:
            _head_rows(out, model, ops, state, sequence, tokens)


def _main_rows(out: NDArray[np.float32], model: Model, ops: Ops, hidden: Array, rows: int) -> None:
    import numpy as np

    for start in range(0, len(out), rows):
        wanted = np.arange(start, min(start + rows, len(out)), dtype=np.int32)
        out[wanted] = ops.get(model.logits(hidden, wanted))


def _head_rows(
    out: NDArray[np.float32], model: Model, ops: Ops, state: StateManager, sequence: Any, tokens: list[int]
) -> None:
    import numpy as np

    ids, head = np.array(tokens, np.int32), model.mtp
    if head is None:
        raise UsageError("this model has no MTP head")

    def run(rows: Rows, hidden: Array, kv: KvLayer) -> None:
        scores, _ = head.forward(ids[rows.positions], hidden, rows, kv, logits=True)
        out[rows.positions] = ops.get(scores)

    state.flush([sequence], run)
