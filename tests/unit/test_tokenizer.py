"""Token ids against golden ones made with llama.cpp, and the ways in which a vocabulary can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dotllm
from dotllm.errors import ModelFileError, UnsupportedModel, UsageError
from dotllm.gguf.reader import GGUFFile
from dotllm.text.pretokenizers import supported_pre_tokenizers
from dotllm.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def story_metadata() -> dict[str, Any]:
    path = Path(dotllm.__file__).parent / "data" / "story-q8_0.gguf"
    with GGUFFile.open(path) as file:
        return {key: value for key, value in file.metadata.items() if key.startswith("tokenizer")}


@pytest.fixture(scope="module")
def story(story_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(story_metadata)


@pytest.fixture(scope="module")
def spm_data() -> dict[str, Any]:
    return json.loads((DATA / "text_spm.json").read_text())


def spm_metadata(data: dict[str, Any], prefix: bool) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.scores": data["scores"],
        "tokenizer.ggml.token_type": data["types"],
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    alphabet = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
    tokens = [*alphabet, "th", "the", "123", "<|end|>", "<think>", "<|eot_id|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 4, 3],
        "tokenizer.ggml.merges": ["t h", "th e", "1 2", "12 3"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 3,
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def test_ids_of_the_demo_model_equal_llama_cpp(story: Tokenizer) -> None:
    for text, special, plain in json.loads((DATA / "text_story_ids.json").read_text()):
        assert story.encode(text) == special, text
        assert story.encode(text, parse_special=False) == plain, text


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2", "smollm", "default", "qwen2"])
def test_ids_of_each_pre_tokenizer_equal_llama_cpp(story_metadata: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_metadata(story_metadata | {"tokenizer.ggml.pre": pre})
    for text, ids in json.loads((DATA / "text_pre_ids.json").read_text())[pre]:
        assert tokenizer.encode(text, parse_special=False) == ids, text


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_a_sentencepiece_vocabulary_equal_llama_cpp(spm_data: dict[str, Any], prefix: bool) -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata(spm_data, prefix))
    for text, special, plain in spm_data["cases"][str(prefix).lower()]:
        assert tokenizer.encode(text, add_special=True) == special, text
        assert tokenizer.encode(text, parse_special=False) == plain, text


def test_what_the_demo_file_says(story: Tokenizer) -> None:
    assert (story.vocab_size, story.bos, story.eos, story.add_bos) == (4096, 4093, 4093, False)
    assert {story.token_text(i) for i in story.end_ids} == {"<|endoftext|>", "<|im_end|>"}
    assert story.token_id("<|im_end|>") == 4095
    assert story.token_id("no such token") is None


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_decoding_gives_the_text_back(story: Tokenizer, text: str) -> None:
    well_formed = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert story.decode(story.encode(text, parse_special=False), special=True) == well_formed


def test_sentencepiece_falls_back_to_bytes_and_keeps_the_space_in_front(spm_data: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata(spm_data, True))
    ids = tokenizer.encode("\U0001f600")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert tokenizer.decode(tokenizer.encode("ok then")) == " ok then"


def test_typed_byte_and_control_tokens_stay_text(spm_data: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata(spm_data, False))
    ids = tokenizer.encode("<0x0A></s>", parse_special=False)
    assert tokenizer.decode(ids) == "<0x0A></s>"
    assert not any(tokenizer.is_control(i) for i in ids)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("qwen2", ["1", "2", "3", "4"]),
        ("qwen35", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["123", "4"]),
        ("default", ["123", "4"]),
    ],
)
def test_digits_depend_on_the_pre_tokenizer(pre: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(pre=pre))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("1234")] == expected


def test_a_combining_mark_belongs_to_the_word_only_in_qwen35() -> None:
    # "i" + U+0300: one word for qwen35, so its bytes can merge; two words for qwen2.
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += ["i\u00cc"]
    metadata["tokenizer.ggml.token_type"] += [1]
    metadata["tokenizer.ggml.merges"] += ["i \u00cc"]
    counts = {}
    for pre in ("qwen2", "qwen35"):
        tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.pre": pre})
        counts[pre] = len(tokenizer.encode("i\u0300"))
    assert counts == {"qwen2": 3, "qwen35": 2}


def test_special_tokens_match_by_kind() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata())
    end, think = tokenizer.token_id("<|end|>"), tokenizer.token_id("<think>")
    assert tokenizer.encode("<|end|><think>") == [end, think]
    plain = tokenizer.encode("<|end|><think>", parse_special=False)
    assert end not in plain
    assert think in plain
    assert tokenizer.decode([end, think]) == "<think>"
    assert tokenizer.decode([end, think], special=True) == "<|end|><think>"
    assert tokenizer.end_ids == {end, tokenizer.token_id("<|eot_id|>")}


def test_a_piece_that_only_merges_know_is_spelled_out() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(merges=["h e", "t he"]))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("the he")] == ["the", "\u0120", "h", "e"]


def test_bos_is_added_where_the_file_asks_for_it() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(bos_token_id=5, add_bos_token=True))
    assert tokenizer.encode("the", add_special=True) == [5, *tokenizer.encode("the")]
    assert Tokenizer.from_metadata(bpe_metadata(bos_token_id=5, pre="llama-bpe")).add_bos
    assert not Tokenizer.from_metadata(bpe_metadata(pre="llama-bpe")).add_bos


def test_a_shadowed_token_keeps_its_text() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += ["the"]
    metadata["tokenizer.ggml.token_type"] += [1]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_text(257) == tokenizer.token_text(tokenizer.vocab_size - 1) == "the"


def test_unknown_pre_tokenizer_is_named_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match="'klingon'") as caught:
        Tokenizer.from_metadata(bpe_metadata(pre="klingon"))
    assert all(name in str(caught.value) for name in supported_pre_tokenizers())


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": []},
        {"token_type": [1]},
        {"eos_token_id": 10**6},
        {"merges": ["nospace"]},
    ],
)
def test_a_damaged_vocabulary_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        Tokenizer.from_metadata(bpe_metadata(**changes))


def test_missing_scores_and_unknown_models_are_refused(spm_data: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="scores"):
        Tokenizer.from_metadata(spm_metadata(spm_data, True) | {"tokenizer.ggml.scores": [0.0]})
    with pytest.raises(UnsupportedModel, match="'bert'"):
        Tokenizer.from_metadata({"tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize("token_id", [-1, 4096])
def test_ids_outside_the_vocabulary_are_refused(story: Tokenizer, token_id: int) -> None:
    for call in (story.token_bytes, story.token_text, story.is_control):
        with pytest.raises(UsageError, match="not in the vocabulary"):
            call(token_id)
    with pytest.raises(UsageError):
        story.decode([token_id])


def test_a_cached_engine_is_used_and_a_corrupt_one_rebuilt(
    spm_data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = spm_metadata(spm_data, True)
    first = Tokenizer.from_metadata(metadata, cache_dir=tmp_path, fingerprint=b"a").encode("hello world")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()

    path.write_bytes(whole[: len(whole) // 2])
    assert Tokenizer.from_metadata(metadata, cache_dir=tmp_path, fingerprint=b"a").encode("hello world") == first
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]

    def refuse(*_: object) -> None:
        raise AssertionError("built although a copy is there")

    monkeypatch.setattr("dotllm.text.build.build_engine", refuse)
    assert Tokenizer.from_metadata(metadata, cache_dir=tmp_path, fingerprint=b"a").encode("hello world") == first
    with pytest.raises(AssertionError):
        Tokenizer.from_metadata(metadata, cache_dir=tmp_path, fingerprint=b"b")


def test_a_cache_that_cannot_be_written_is_no_error(spm_data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    metadata = spm_metadata(spm_data, True)
    assert Tokenizer.from_metadata(metadata, cache_dir=tmp_path / "file", fingerprint=b"a").encode("hello")
