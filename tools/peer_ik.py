"""ik_llama.cpp as a peer to compare speed with: the library inside the PyPI package ik-llama-cpp-python.

The layouts are the package's own. The fork's default is flash attention; the package's high-level class turns it off on
processors without AVX-VNNI of 256 bits, where an answer comes a little faster without it, and a prompt slower.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["IkPeer"]


class IkPeer:
    """A GGUF file in ik_llama.cpp, with its defaults but for `flash`; one sequence, at most `context` tokens."""

    def __init__(self, path: Path, context: int, threads: int, *, flash: bool) -> None:
        try:
            from ik_llama_cpp import _ctypes_api as api
        except ImportError:
            raise SystemExit("ik_llama.cpp is not installed: python -m pip install ik-llama-cpp-python") from None
        self._api, self._context_size = api, context
        api.llama_backend_init()
        model = api.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(os.fsencode(path), model)
        if not self._model:
            raise SystemExit(f"ik_llama.cpp cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = flash
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("ik_llama.cpp cannot make a context; is there memory enough?")
        self.tokens = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._batch = api.llama_batch_init(context, 0, 1)

    def feed(self, tokens: Sequence[int], first: int) -> None:
        """Compute tokens at positions first, first + 1, ..., and the logits of the last; position 0 begins a text."""
        if first + len(tokens) > self._context_size:
            raise SystemExit(f"{first} + {len(tokens)} tokens; this peer takes 1 to {self._context_size}")
        if first == 0:
            self._api.llama_kv_cache_clear(self._context)
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i, 1
            batch.logits[i] = i == len(tokens) - 1
            batch.seq_id[i][0] = 0
        failed = self._api.llama_decode(self._context, batch)
        if failed:
            raise SystemExit(f"llama_decode of ik_llama.cpp fails with {failed}")
