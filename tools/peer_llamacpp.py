"""llama.cpp as a peer to compare with: the library inside the PyPI package xllamacpp, called through ctypes.

For comparisons of numbers: plain kernels, a float32 key/value cache, no flash attention, one thread, which is as sharp
as it can be. For comparisons of speed: everything as llama.cpp has it by default. The layouts below are those of
llama.cpp b11549 (xllamacpp 2026.10.11549, the extra `bench`); `Peer` refuses any other.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ["Peer", "quantize_rows"]

VERSION = "2026.10.11549"
SEQUENCE = 0
MTP_CONTEXT, DECODER_GRAPH = 1, 1
ERROR_LEVEL = 4
Logits = NDArray[np.float32]


class ModelParams(ctypes.Structure):
    """llama_model_params."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    """llama_context_params."""

    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")),
        *((name, c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_data", c_void_p),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class Rows(ctypes.Structure):
    """A view of embedding rows, as llama_batch_ext takes it."""

    _fields_ = (("data", POINTER(c_float)), ("n_rows", c_size_t), ("n_embd", c_size_t))


LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name: result, arguments
    "llama_backend_init": (None,),
    "llama_log_set": (None, LOG, c_void_p),
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_model_free": (None, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_model_n_embd": (c_int32, c_void_p),
    "llama_model_n_layer_nextn": (c_int32, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_init_from_model": (c_void_p, c_void_p, ContextParams),
    "llama_free": (None, c_void_p),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_batch_free": (None, Batch),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_get_logits_ith": (POINTER(c_float), c_void_p, c_int32),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    "llama_batch_ext_init": (c_void_p, c_void_p),
    "llama_batch_ext_free": (None, c_void_p),
    "llama_batch_ext_add_token": (c_int32, c_void_p, c_int32, c_int32),
    "llama_batch_ext_set_pos": (c_bool, c_void_p, c_int32, POINTER(c_int32)),
    "llama_batch_ext_set_embd_state": (c_bool, c_void_p, c_int32, Rows),
    "llama_batch_ext_set_output_logits": (c_bool, c_void_p, c_int32, c_bool),
    "llama_process": (c_int32, c_void_p, c_int32, c_void_p),
    # C++ functions, without a C name
    "_Z26llama_set_embeddings_nextnP13llama_contextbb": (None, c_void_p, c_bool, c_bool),
    "_Z30llama_get_embeddings_nextn_ithP13llama_contexti": (POINTER(c_float), c_void_p, c_int32),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
}
SET_NEXTN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
GET_NEXTN = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"


def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise SystemExit(f"llama.cpp is not installed: python -m pip install xllamacpp=={VERSION}")
    if version("xllamacpp") != VERSION:
        raise SystemExit(f"this tool knows xllamacpp {VERSION}, not {version('xllamacpp')}")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    library = ctypes.CDLL(str(Path(spec.origin).parent / "xllamacpp.abi3.so"))
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def quantize_rows(matrix: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """ggml's own quantiser: (N, K) float32 -> (N, bytes a row); no importance matrix."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = matrix.shape
    if columns % block:
        raise SystemExit(f"rows of {columns} values cannot be {kind.name}: its blocks hold {block}")
    out = np.zeros((rows, columns // block * size), np.uint8)
    written = _library().ggml_quantize_chunk(int(kind), matrix.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    if written != out.nbytes:
        raise SystemExit(f"ggml wrote {written} bytes of {kind.name}, expected {out.nbytes}")
    return out


class Peer:
    """A GGUF file in llama.cpp; one sequence, at most `context` tokens. A context manager.

    The cache is float32, flash attention off, weights as in the file; or all three as llama.cpp has them by `defaults`.
    An MTP head is left out unless `mtp`.
    """

    def __init__(
        self, path: Path, context: int = 512, threads: int = 1, *, defaults: bool = False, mtp: bool = True
    ) -> None:
        self._library = library = _library()
        self._context_size, self._threads, self._defaults = context, threads, defaults
        self._log = LOG(lambda level, text, _: print(text.decode("utf-8", "replace")) if level == ERROR_LEVEL else None)
        library.llama_log_set(self._log, None)
        library.llama_backend_init()
        params = library.llama_model_default_params()
        params.use_extra_bufts = defaults  # repacked weights are rounded differently
        params.n_gpu_layers = 0
        params.load_mtp = mtp
        self._model = library.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self.tokens = int(library.llama_vocab_n_tokens(self._vocabulary))
        self._width = int(library.llama_model_n_embd(self._model))
        self.has_mtp = mtp and bool(library.llama_model_n_layer_nextn(self._model))
        self._main = self._new_context(0, None)
        self._mtp: int | None = None
        if self.has_mtp:
            getattr(library, SET_NEXTN)(self._main, True, False)
            self._mtp = self._new_context(MTP_CONTEXT, self._main)
            getattr(library, SET_NEXTN)(self._mtp, True, True)

    def _new_context(self, kind: int, other: int | None) -> int:
        params = self._library.llama_context_default_params()
        if (params.n_batch, params.n_ubatch, params.n_seq_max) != (2048, 512, 1):
            raise SystemExit("the layout of llama_context_params is not the one that this tool knows")
        params.n_ctx = params.n_batch = self._context_size
        if not self._defaults:
            params.n_ubatch = self._context_size
        params.n_threads = params.n_threads_batch = self._threads
        if not self._defaults:
            params.type_k = params.type_v = params.flash_attn_type = 0  # float32, off
        params.ctx_type, params.ctx_other = kind, other
        params.no_perf = True
        params.op_offload = params.offload_kqv = False
        context = self._library.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit("llama.cpp cannot make a context; is there memory enough?")
        return int(context)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for context in (self._mtp, self._main):
            if context is not None:
                self._library.llama_free(context)
        self._library.llama_model_free(self._model)

    def _rows(self, context: int, count: int) -> Logits:
        get = self._library.llama_get_logits_ith
        return np.stack([np.ctypeslib.as_array(get(context, i), (self.tokens,)).copy() for i in range(count)])

    def _decode(self, tokens: Sequence[int], first: int) -> Logits:
        """Logits (n, vocabulary) of tokens at positions first, first + 1, ..."""
        self._run(tokens, first, every=True)
        return self._rows(self._main, len(tokens))

    def _run(self, tokens: Sequence[int], first: int, *, every: bool) -> None:
        """Compute tokens at positions first, first + 1, ...; logits of every one, or of the last."""
        batch = self._library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i, 1
            batch.logits[i] = every or i == len(tokens) - 1
            batch.seq_id[i][0] = SEQUENCE
        failed = self._library.llama_decode(self._main, batch)
        self._library.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"llama_decode fails with {failed}")

    def feed(self, tokens: Sequence[int], first: int) -> None:
        """Compute tokens at positions first, first + 1, ..., and the logits of the last, which stay where they are.

        Position 0 begins a new text.
        """
        self._check(tokens, first)
        if first == 0:
            self._clear(self._main)
        self._run(tokens, first, every=False)

    def _clear(self, context: int) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(context), True)

    @overload
    def logits(self, tokens: Sequence[int], *, mtp: Literal[False] = False) -> Logits: ...
    @overload
    def logits(self, tokens: Sequence[int], *, mtp: Literal[True]) -> tuple[Logits, Logits]: ...
    def logits(self, tokens: Sequence[int], *, mtp: bool = False) -> Logits | tuple[Logits, Logits]:
        """Logits (n, vocabulary) after each token; with `mtp`, also those of the MTP head on the same rows."""
        self._check(tokens)
        self._clear(self._main)
        found = self._decode(tokens, 0)
        if not mtp:
            return found
        get = getattr(self._library, GET_NEXTN)
        hidden = [np.ctypeslib.as_array(get(self._main, i), (self._width,)).copy() for i in range(len(tokens))]
        before = [np.zeros(self._width, np.float32), *hidden[:-1]]
        return found, self._mtp_logits(tokens, before)

    def _mtp_logits(self, tokens: Sequence[int], hidden: Sequence[NDArray[np.float32]]) -> Logits:
        """The head's logits (n, vocabulary) for the pairs (token i, hidden state of the position before it)."""
        library = self._library
        if self._mtp is None:
            raise SystemExit("this model has no MTP head")
        self._clear(self._mtp)
        batch = library.llama_batch_ext_init(self._mtp)
        for position, (token, row) in enumerate(zip(tokens, hidden, strict=True)):
            view = Rows(row.ctypes.data_as(POINTER(c_float)), 1, self._width)
            index = library.llama_batch_ext_add_token(batch, SEQUENCE, token)
            library.llama_batch_ext_set_pos(batch, index, ctypes.byref(c_int32(position)))
            library.llama_batch_ext_set_embd_state(batch, index, view)
            library.llama_batch_ext_set_output_logits(batch, index, True)
        failed = library.llama_process(self._mtp, DECODER_GRAPH, batch)
        library.llama_batch_ext_free(batch)
        if failed:
            raise SystemExit(f"llama_process fails with {failed}")
        return self._rows(self._mtp, len(tokens))

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` most likely next tokens, one after the other."""
        self._check(tokens, count)
        self._clear(self._main)
        last, out = self._decode(tokens, 0)[-1], []
        for position in range(len(tokens), len(tokens) + count):
            out.append(int(last.argmax()))
            last = self._decode(out[-1:], position)[-1]
        return out

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids; special tokens spelt out in the text are recognised."""
        raw = text.encode()
        out = (c_int32 * (len(raw) + 8))()
        count = self._library.llama_tokenize(self._vocabulary, raw, len(raw), out, len(out), add_special, True)
        if count < 0:
            raise SystemExit(f"llama.cpp cannot tokenize {text[:40]!r}")
        return list(out[:count])

    def _check(self, tokens: Sequence[int], more: int = 0) -> None:
        if not tokens or len(tokens) + more > self._context_size:
            raise SystemExit(f"{len(tokens)} + {more} tokens; this peer takes 1 to {self._context_size}")
        if min(tokens) < 0 or max(tokens) >= self.tokens:
            raise SystemExit(f"token ids must lie in 0..{self.tokens - 1}")
