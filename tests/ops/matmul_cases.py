"""Random weights of every type, and a digest of products with them: `python matmul_cases.py N K M TYPE...` prints it.

Run in other processes by the tests, under other instruction sets and without compilation.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.types import FORMATS, GGMLType
from dotllm.kernels_cpu.cache import prepare_cache

_HALVES = {
    "F32": (),
    "BF16": (),
    "MXFP4": (),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}  # where float16 scales lie in a block; elsewhere at byte 0


def random_weights(type: GGMLType, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows (N, row bytes) of random blocks with scales of ordinary size."""
    rng = np.random.default_rng(seed)
    block = FORMATS[type]
    if type.name in ("F32", "BF16"):
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        return (
            values.view(np.uint8)
            if type.name == "F32"
            else values.view(np.uint8).reshape(-1, 4)[:, 2:].reshape(rows, -1)
        )
    raw = rng.integers(0, 256, (rows, columns // block.elements, block.bytes), dtype=np.uint8)
    for at in _HALVES.get(type.name, (0,)):
        scales = rng.uniform(-0.01, 0.01, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    if type.name == "MXFP4":
        raw[..., 0] = rng.integers(118, 124, raw.shape[:2])
    return raw.reshape(rows, -1)


def digests(rows: int, columns: int, tokens: int, names: list[str]) -> list[str]:
    """One line a type: the digest of a product with bias, and of a gathered product."""
    from dotllm.kernels_cpu.matmul import load_weight, matmul, matmul_gathered
    from dotllm.kernels_cpu.quantize import quantize

    lines = []
    for name in names:
        type = GGMLType[name]
        x = np.random.default_rng(1).standard_normal((tokens, columns)).astype(np.float32)
        raw = np.stack([random_weights(type, rows, columns, seed) for seed in range(2)])
        rounded = quantize(x, FORMATS[type].activation, 1)
        out = np.empty((tokens, rows), np.float32)
        bias = np.linspace(-1, 1, rows, dtype=np.float32)
        matmul(load_weight(type, raw[0]), rounded, out, bias, False, 1)
        pairs = np.empty((3, rows), np.float32)
        row, expert = np.array([0, tokens - 1, 0], np.int32), np.array([1, 0, 1], np.int32)
        matmul_gathered(load_weight(type, raw), rounded, row, expert, pairs, 1)
        lines.append(f"{name} {hashlib.sha256(out.tobytes() + pairs.tobytes()).hexdigest()[:16]}")
    return lines


if __name__ == "__main__":
    prepare_cache()
    size = [int(argument) for argument in sys.argv[1:4]]
    print("\n".join(digests(*size, sys.argv[4:])))  # noqa: T201
