"""Looking rows up: of a token embedding as it lies in the file, and of a matrix of floats.

embed    out[i] = table[ids[i]] * scale, each block of the row decoded where it lies       gather   out[i] = x[index[i]]
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from dotllm.gguf.types import FORMATS, GGMLType
from dotllm.kernels_cpu.decode import decode_block
from dotllm.kernels_cpu.executor import name_closure

__all__ = ["embed_kernel", "gather_part"]


@cache
def embed_kernel(format: str) -> Any:
    """The lookup in a table of `format`, a key of `decode.DECODERS`."""
    elements, size = FORMATS[GGMLType[format]].elements, FORMATS[GGMLType[format]].bytes

    def embed(table: Any, ids: Any, scale: float, out: Any, part: int, parts: int) -> None:
        # table u8 flat (V * row bytes,), ids (M,), out (M, E); blocks of all rows are shared out
        rows, width = out.shape
        flat, factor = out.reshape(-1), np.float32(scale)
        blocks = width // elements
        for block in range(rows * blocks * part // parts, rows * blocks * (part + 1) // parts):
            row, at = block // blocks, block * elements
            decode_block(format, table, (np.int64(ids[row]) * blocks + block % blocks) * size, flat, at)
            for i in range(at, at + elements):
                flat[i] = flat[i] * factor

    name_closure(embed, f"embed_{format}")
    return njit(cache=True)(embed)


@njit(cache=True)
def gather_part(x: Any, index: Any, out: Any, part: int, parts: int) -> None:
    # x (M * E,), index (R,), out (R, E)
    rows, width = out.shape
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        at = np.int64(index[row]) * width
        for i in range(width):
            out[row, i] = x[at + i]
