"""R16: quantised weights with sixteen output rows interleaved, and one micro-kernel per format.

    GGUF   row 0: |block 0|block 1|..     R16   |block 0 of rows 0-15|block 1 of rows 0-15|..   then rows 16-31
           row 1: |block 0|block 1|..            d x 16 | .. | q[0:4] of row 0, of row 1, ..., of row 15 | q[4:8] ..

A vector then holds four neighbouring values of sixteen rows. Four activations, broadcast, meet it in one integer dot
product, lane r gathers row r, and no sum ever crosses lanes: the order of summation is one and the same for every
number of tokens. The bytes are those of the GGUF block in another order (Q6_K: 1 % of padding).

A micro-kernel adds one block to the float accumulators of T tokens. It is written once over a machine `e`: compiled by
`machine_llvm`, run in Python by `machine_py`. Integer sums are exact, so every instruction set gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.types import FORMATS, GGMLType

__all__ = ["R16", "Layout", "repack"]

Bytes = NDArray[np.uint8]
Values = list[Any]
Pieces = Iterator[tuple[Any, int]]  # (four weights of each row, which activations they meet)


def _scaled_sums(e: Any, acc: Values, parts: Values, d: Any) -> Values:
    """acc + d * dx * parts, for each token"""
    return [e.fma(e.float(part), d * e.scale(t), acc[t]) for t, part in enumerate(parts)]


def _q8_0(e: Any, acc: Values) -> Values:
    """y += d * dx * sum(q * x)"""
    parts = e.dots_signed((e.bytes(32 + 64 * j), 4 * j) for j in range(8))
    return _scaled_sums(e, acc, parts, e.halves(0))


def _nibbles(e: Any, at: int) -> Pieces:
    """Sixteen bytes a row: values 0-15 in the low nibbles, 16-31 in the high ones."""
    for j in range(4):
        v = e.bytes(at + 64 * j)
        yield v & 15, 4 * j
        yield v >> 4, 16 + 4 * j


def _q4_0(e: Any, acc: Values) -> Values:
    """y += d * dx * (sum(q * x) - 8 sum(x))"""
    parts = e.dots(_nibbles(e, 32), 15)
    return _scaled_sums(e, acc, [part - (e.sum(t, 0) << 3) for t, part in enumerate(parts)], e.halves(0))


def _q4_1(e: Any, acc: Values) -> Values:
    """y += d * dx * sum(q * x) + m * offset"""
    acc = _scaled_sums(e, acc, e.dots(_nibbles(e, 64), 15), e.halves(0))
    m = e.halves(32)
    return [e.fma(m, e.offset(t), value) for t, value in enumerate(acc)]


def _k_minima(e: Any, acc: Values) -> Values:
    """y -= dmin * dx * sum over sub-blocks of min * sum(x)"""

    def add(i: Any, lows: Any) -> Any:
        least = e.small(i * 16 + 192)
        return [low + e.product(least, e.sum(t, i * 2) + e.sum(t, i * 2 + 1)) for t, low in enumerate(lows)]

    lows = e.repeat(8, add, [e.zero() for _ in acc])
    dmin = e.halves(32)
    return [value - e.float(lows[t]) * (dmin * e.scale(t)) for t, value in enumerate(acc)]


def _q4_k(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * sum(q * x), less the minima"""

    def add(c: Any, total: Any) -> Any:  # 32 bytes a row: sub-block 2c is their low nibbles, 2c + 1 the high ones
        low = ((e.bytes(c * 512 + (320 + 64 * j)) & 15, c * 64 + 4 * j) for j in range(8))
        high = ((e.bytes(c * 512 + (320 + 64 * j)) >> 4, c * 64 + (32 + 4 * j)) for j in range(8))
        total = e.dots_scaled(total, e.small(c * 32 + 64), low, 15)
        return e.dots_scaled(total, e.small(c * 32 + 80), high, 15)

    total = e.repeat(4, add, [e.zero() for _ in acc])
    return _scaled_sums(e, _k_minima(e, acc), total, e.halves(0))


def _q5_k(e: Any, acc: Values) -> Values:
    """As Q4_K, with bit i of 32 more bytes a row as fifth bit of sub-block i"""

    def pieces(c: Any, high: int) -> Pieces:
        for j in range(8):
            v, fifth = e.bytes(c * 512 + (832 + 64 * j)), e.bit(e.bytes(320 + 64 * j), c * 2 + high)
            yield (v >> 4 if high else v & 15) | (fifth << 4), c * 64 + (32 * high + 4 * j)

    def add(c: Any, total: Any) -> Any:
        total = e.dots_scaled(total, e.small(c * 32 + 64), pieces(c, 0), 31)
        return e.dots_scaled(total, e.small(c * 32 + 80), pieces(c, 1), 31)

    total = e.repeat(4, add, [e.zero() for _ in acc])
    return _scaled_sums(e, _k_minima(e, acc), total, e.halves(0))


def _q6_k(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * (sum(q * x) - 32 sum(x))"""

    def pieces(half: Any, group: int, part: int) -> Pieces:
        for j in range(4):  # group g: nibble g // 2 of low bytes g % 2, and bits 2g, 2g + 1 of the high bytes
            low = e.bytes(half * 1024 + (8 * (group % 2) + 4 * part + j) * 64)
            high = e.bytes(half * 512 + (2048 + (4 * part + j) * 64))
            two = high << (4 - 2 * group) if group < 2 else high >> (2 * group - 4)
            yield (low & 15 if group < 2 else low >> 4) | (two & 48), half * 128 + (32 * group + 16 * part + 4 * j)

    def add(half: Any, total: Values) -> Values:  # 128 values: four groups of 32, each two sub-blocks of 16
        for group in range(4):
            for part in range(2):
                scale = e.signed_small(half * 128 + (3072 + 32 * group + 16 * part))
                less = [e.product(scale, e.sum(t, half * 8 + (2 * group + part))) << 5 for t in range(len(total))]
                total = e.dots_scaled(total, scale, pieces(half, group, part), 63)
                total = [value - less[t] for t, value in enumerate(total)]
        return total

    total = e.repeat(2, add, [e.zero() for _ in acc])
    return _scaled_sums(e, acc, total, e.halves(3328))


@dataclass(frozen=True, slots=True)
class Layout:
    """How one format is interleaved: parts of a GGUF block as (first byte, last byte, unit), in R16 order.

    Before that, `expand` may rewrite the blocks (Q4_K and Q5_K: 6-bit scales and minima as bytes, 3 % more of them).
    unit 4 interleaves the rows four bytes at a time, 2 two bytes (a float16), 1 byte by byte; `padding` zero bytes end
    the block. `sums` is how many activation sums it meets; `ahead`, how early weights are fetched, in bytes.
    """

    type: GGMLType
    micro: Callable[[Any, Values], Values]
    parts: tuple[tuple[int, int, int], ...]
    sums: int
    ahead: int
    padding: int = 0
    expand: Callable[[Bytes], Bytes] | None = None

    @property
    def elements(self) -> int:
        return FORMATS[self.type].elements

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of sixteen rows."""
        return 16 * sum(last - first for first, last, _ in self.parts) + self.padding


def _expand_scales(rows: Bytes) -> Bytes:
    """Blocks d dmin packed[12] .. of Q4_K and Q5_K as d dmin scale[8] min[8] .."""
    packed = rows[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = [low & 63, (high & 15) | (low >> 6 << 4)]
    mins = [middle & 63, (high >> 4) | (middle >> 6 << 4)]
    return np.concatenate([rows[..., :4], *scales, *mins, rows[..., 16:]], axis=-1)


def _layouts() -> dict[str, Layout]:
    T = GGMLType
    layouts = (
        Layout(T.Q8_0, _q8_0, ((0, 2, 2), (2, 34, 4)), 1, 4096),
        Layout(T.Q4_0, _q4_0, ((0, 2, 2), (2, 18, 4)), 1, 4096),
        Layout(T.Q4_1, _q4_1, ((0, 2, 2), (2, 4, 2), (4, 20, 4)), 1, 4096),
        Layout(T.Q4_K, _q4_k, ((0, 2, 2), (2, 4, 2), (4, 20, 1), (20, 148, 4)), 16, 3072, 0, _expand_scales),
        Layout(T.Q5_K, _q5_k, ((0, 2, 2), (2, 4, 2), (4, 20, 1), (20, 180, 4)), 16, 3072, 0, _expand_scales),
        Layout(T.Q6_K, _q6_k, ((0, 128, 4), (128, 192, 4), (192, 208, 1), (208, 210, 2)), 16, 3072, padding=32),
    )
    return {layout.type.name: layout for layout in layouts}


R16 = _layouts()
"""The formats that have a micro-kernel, by name."""


def repack(layout: Layout, raw: Bytes, out: Bytes) -> None:
    """Rows (N, row bytes) of GGUF blocks into zeroed R16 (ceil(N / 16), blocks, block_bytes); missing rows stay 0."""
    size = FORMATS[layout.type].bytes
    groups, blocks = out.shape[:2]
    for group in range(groups):
        rows = raw[16 * group : 16 * group + 16].reshape(-1, blocks, size)
        rows = rows if layout.expand is None else layout.expand(rows)
        at = 0
        for first, last, unit in layout.parts:
            count, width = (last - first) // unit, 16 * (last - first)
            target = out[group, :, at : at + width].reshape(blocks, count, 16, unit)
            target[:, :, : len(rows)] = rows[:, :, first:last].reshape(-1, blocks, count, unit).transpose(1, 2, 0, 3)
            at += width
