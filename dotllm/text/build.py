"""Building the merge engine (Hugging Face `tokenizers`) from GGUF metadata, and keeping it on disk between runs."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from dotllm.errors import ModelFileError
from dotllm.text.pretokenizers import PreTokenizer
from dotllm.text.sentencepiece import merges_from_scores
from dotllm.text.vocabulary import PREFIX, TokenKind, Vocabulary

__all__ = ["build_engine", "load_or_build_engine"]

# Part of the key of a cached engine: a change in how engines are built must not find the old ones.
_LAYOUT = 1


def load_or_build_engine(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, cache_dir: Path | None, fingerprint: bytes | None
) -> tokenizers.Tokenizer:
    """The engine from the cache if an intact copy is there, else newly built (and cached).

    Only SentencePiece engines are kept: finding half a million merges takes seconds, whereas a file that lists its
    merges is read as fast as a cached copy. Without `cache_dir` or `fingerprint` nothing is read or written. A cache
    that cannot be written is no error: the next start is slower, that is all.
    """
    if not vocabulary.sentencepiece or cache_dir is None or fingerprint is None:
        return build_engine(metadata, vocabulary)
    key = hashlib.sha256(b"%d|%s|" % (_LAYOUT, tokenizers.__version__.encode()) + fingerprint).hexdigest()
    path = cache_dir / f"tokenizer-{key[:32]}.json"
    engine = _load(path)
    if engine is None:
        engine = build_engine(metadata, vocabulary)
        with suppress(OSError):
            _store(path, engine.to_str().encode())
    return engine


def _load(path: Path) -> tokenizers.Tokenizer | None:
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest.decode("ascii", "replace") != hashlib.sha256(body).hexdigest():
        return None
    try:
        return tokenizers.Tokenizer.from_buffer(body)
    except Exception:  # the Rust side raises bare Exception; whatever it says, the copy is of no use
        return None


def _store(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def build_engine(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """An engine that merges plain text; special tokens are split off before the text gets here.

    Raises ModelFileError if the tokens, merges or scores do not fit together.
    """
    tokens: list[str] = list(metadata[PREFIX + "tokens"])
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    try:
        if vocabulary.sentencepiece:
            model = models.BPE(vocab=ids, merges=_score_merges(metadata, tokens, vocabulary), byte_fallback=True)
        else:
            merges = [_pair(line) for line in metadata.get(PREFIX + "merges", ())]
            _add_halfway_tokens(ids, merges)
            model = models.BPE(vocab=ids, merges=merges, ignore_merges=vocabulary.rule.ignore_merges)
    except ModelFileError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelFileError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    engine = tokenizers.Tokenizer(model)
    if not vocabulary.sentencepiece:
        engine.pre_tokenizer = _splitter(vocabulary.rule)
    return engine


def _splitter(rule: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(line: str) -> tuple[str, str]:
    # The separator is the first space after the first character: a space can be a left part of its own.
    left, _, right = line[1:].partition(" ")
    if not right:
        raise ModelFileError(f"tokenizer.ggml.merges: {line!r} is not 'left right'; the file is damaged")
    return line[0] + left, right


def _add_halfway_tokens(ids: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Give pieces that only merges know ids beyond the vocabulary.

    A cut-down vocabulary keeps "h e" and "t he" though "he" is no token. Merging must pass through such a piece; one
    that is left at the end is spelled out in single bytes (`Tokenizer.encode`).
    """
    beyond = max(ids.values()) + 1
    for left, right in merges:
        for piece in (left, right, left + right):
            if piece not in ids:
                ids[piece] = beyond
                beyond += 1


def _score_merges(metadata: Mapping[str, Any], tokens: list[str], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    scores = metadata.get(PREFIX + "scores", ())
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; the file is damaged"
        )
    unmergeable = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE)
    mergeable = [kind not in unmergeable for kind in vocabulary.kinds]
    return merges_from_scores(tokens, [float(score) for score in scores], mergeable)
