"""An engine from a file: sizes, defaults, refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from engines import answer

from dotllm.engine import load
from dotllm.engine.load import DEFAULT_CONTEXT, load_engine, open_tokenizer, warm_up
from dotllm.engine.request import Request
from dotllm.errors import ModelFileError, OutOfMemory, UsageError
from dotllm.gguf.reader import GGUFFile
from dotllm.ops.reference import NumpyOps
from dotllm.ops.select import compiling, select_ops
from dotllm.state.blocks import pages_for
from dotllm.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "user_cache_path", lambda *_, **__: tmp_path / "cache")


def test_a_file_becomes_an_engine_that_answers(tiny_gguf: Callable[..., Path]) -> None:
    stages: list[str] = []
    ops = NumpyOps()
    with closing(load_engine(tiny_gguf("qwen35", "Q8_0"), ops, sequences=2, progress=stages.append)) as loaded:
        assert stages == ["reading the file", "building the tokenizer", "loading the weights"]
        assert loaded.context == min(loaded.config.context_length, DEFAULT_CONTEXT)
        assert loaded.load_ms > 0
        with compiling(ops):
            warm_up(loaded.engine, rows=(1, 40))
        assert loaded.engine.state.used_pages == 0
        assert loaded.engine.state.free_sequences == 2
        prompt = tuple(loaded.tokenizer.encode("Once upon a time"))
        events = list(loaded.engine.generate(Request(prompt, max_tokens=4, ignore_eos=True)))
        assert len(answer(events)) == 4
        assert "".join(e.text for e in events) == loaded.tokenizer.decode(answer(events))


def test_the_context_is_the_models_own_unless_asked(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("qwen3", "F32")
    for wanted in (0, 40, 100):
        with closing(load_engine(path, NumpyOps(), context=wanted, checkpoints=0)) as loaded:
            assert loaded.context == loaded.engine.context == (wanted or loaded.config.context_length)
            assert loaded.engine.state.pages == pages_for(loaded.context) + 2
    with pytest.raises(UsageError, match="-1"):
        load_engine(path, NumpyOps(), context=-1)


def test_what_does_not_fit_is_refused_with_numbers(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (load.available_memory() or 1 << 40) > 1 << 20
    path = tiny_gguf("qwen3", "F32")
    with pytest.raises(OutOfMemory, match=r"3 x 100000000 tokens \d+\.\d\d GiB, but \d+"):
        load_engine(path, NumpyOps(), context=100_000_000, sequences=3)
    monkeypatch.setattr(load, "available_memory", lambda: path.stat().st_size)
    with pytest.raises(OutOfMemory, match="weights need"):
        load_engine(path, NumpyOps())


def test_a_bad_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"<!DOCTYPE html>" * 10)
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        load_engine(tmp_path / "bad.gguf", NumpyOps())


def test_tokenizer_and_embedding_are_of_one_size(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(file: GGUFFile) -> Tokenizer:
        parts = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
        return Tokenizer.from_metadata({**file.metadata, **{part: file.metadata[part][:-1] for part in parts}})

    monkeypatch.setattr(load, "open_tokenizer", short)
    with pytest.raises(ModelFileError, match=r"tokenizer has 303 tokens and the embedding 304 rows"):
        load_engine(tiny_gguf("qwen3"), NumpyOps())


def test_the_tokenizer_of_a_sentencepiece_model_is_kept_in_the_cache(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    with closing(load_engine(tiny_gguf("llama", "F32", vocab="spm"), NumpyOps())) as loaded:
        assert list((tmp_path / "cache" / "tokenizers").iterdir())
        again = open_tokenizer(loaded.file)
        assert again.encode("Once upon") == loaded.tokenizer.encode("Once upon")


def test_backends_by_name() -> None:
    assert select_ops("numpy").name == "numpy"
    with pytest.raises(UsageError, match=r"'tpu'.*cpu, numpy"):
        select_ops("tpu")
