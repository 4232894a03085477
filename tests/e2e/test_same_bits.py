"""A row's logits are the same bits in every batch, chunk, thread count, instruction set, and without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Run, open_model

from dotllm.ops.protocol import Ops
from dotllm.ops.select import select_ops

MODELS = [
    ("qwen35", "F32"),
    ("qwen35", "Q8_0"),
    ("qwen35", "Q4_K"),
    ("qwen35", "Q6_K"),
    ("qwen35moe", "Q4_1"),
    ("gemma3", "F16"),
    ("llama", "Q5_0"),
]
TOKENS = np.random.default_rng(0).integers(0, 256, 600).tolist()


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("cpu", 2)


@pytest.mark.parametrize(("arch", "kind"), MODELS)
def test_chunks(arch: str, kind: str, ops: Ops, tiny_gguf: Any) -> None:
    run = Run.of(open_model(tiny_gguf(arch, kind), ops, context=640), ops, context=640)
    long = run.logits(TOKENS, 512)
    np.testing.assert_array_equal(run.logits(TOKENS, 64), long)
    np.testing.assert_array_equal(run.logits(TOKENS[:120], 7), long[:120])
    np.testing.assert_array_equal(run.logits(TOKENS[:70], 1), long[:70])
    if run.model.mtp is not None:
        heads = run.mtp_logits(TOKENS[:120], 120)
        np.testing.assert_array_equal(run.mtp_logits(TOKENS[:120], 7), heads)
        np.testing.assert_array_equal(run.mtp_logits(TOKENS[:120], 1), heads)


@pytest.mark.parametrize(("arch", "kind"), MODELS)
def test_batches(arch: str, kind: str, ops: Ops, tiny_gguf: Any) -> None:
    run = Run.of(open_model(tiny_gguf(arch, kind), ops, context=64), ops, sequences=32, context=64)
    prompts = [TOKENS[i : i + 3 + i % 9] for i in range(32)]
    alone = [run.logits(prompt) for prompt in prompts]
    for count in (2, 3, 5, 8, 17, 32):
        sequences = [run.state.open() for _ in range(count)]
        cut = [1 + i % 3 for i in range(count)]
        first = run.extend(sequences, [p[:c] for p, c in zip(prompts, cut, strict=False)])
        rest = run.extend(sequences, [p[c:] for p, c in zip(prompts, cut, strict=False)])
        for i, sequence in enumerate(sequences):
            np.testing.assert_array_equal(np.concatenate([first[i], rest[i]]), alone[i])
            run.state.close(sequence)


def _digests(paths: list[Path], threads: int = 2, **environment: str) -> list[str]:
    command = [sys.executable, str(Path(__file__).parent / "logits_digest.py"), str(threads), *map(str, paths)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_machines(tiny_gguf: Any) -> None:
    """One thread, generic vectors for a plain x86-64-v3, and the Python twins of the kernels."""
    paths = [tiny_gguf(arch, kind) for arch, kind in MODELS]
    usual = _digests(paths)
    assert len(set(usual)) == len(paths)
    assert _digests(paths, threads=1) == usual
    assert _digests(paths, DOTLLM_ISA="generic", NUMBA_CPU_NAME="x86-64-v3") == usual
    small = [tiny_gguf("qwen35", "F32", layers=2), tiny_gguf("qwen35", "Q8_0", layers=2)]
    assert _digests(small, NUMBA_DISABLE_JIT="1") == _digests(small)
