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


def _k_scales(e: Any) -> tuple[Values, Values]:
    """The eight 6-bit scales and minima of Q4_K and Q5_K."""
    u0, u1, u2 = e.words(64), e.words(128), e.words(192)
    scales = (u0 & 0x3F3F3F3F, (u2 & 0x0F0F0F0F) | (((u0 >> 6) & 0x03030303) << 4))
    mins = (u1 & 0x3F3F3F3F, ((u2 >> 4) & 0x0F0F0F0F) | (((u1 >> 6) & 0x03030303) << 4))
    first, second = ([(pair[i // 4] >> (8 * (i % 4))) & 255 for i in range(8)] for pair in (scales, mins))
    return first, second


def _k_minima(e: Any, acc: Values, mins: Values) -> Values:
    """y -= dmin * dx * sum over sub-blocks of min * sum(x)"""
    lows = [e.zero() for _ in acc]
    for i, least in enumerate(mins):
        lows = [low + e.product(least, e.sum(t, 2 * i) + e.sum(t, 2 * i + 1)) for t, low in enumerate(lows)]
    dmin = e.halves(32)
    return [value - e.float(lows[t]) * (dmin * e.scale(t)) for t, value in enumerate(acc)]


def _q4_k(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * sum(q * x), less the minima"""
    scales, mins = _k_scales(e)
    acc = e.pin(_k_minima(e, acc, mins))
    total = [e.zero() for _ in acc]
    for i, scale in enumerate(scales):  # 32 bytes a row hold sub-block 2c in the low nibbles, 2c + 1 in the high ones

        def pieces(i: int = i) -> Pieces:
            for j in range(8):
                v = e.bytes(256 + (8 * (i // 2) + j) * 64)
                yield (v & 15 if i % 2 == 0 else v >> 4), 32 * i + 4 * j

        total = e.pin(e.dots_scaled(total, scale, pieces(), 15))
    return _scaled_sums(e, acc, total, e.halves(0))


def _q5_k(e: Any, acc: Values) -> Values:
    """As Q4_K, with bit i of 32 more bytes a row as fifth bit of sub-block i"""
    scales, mins = _k_scales(e)
    acc = e.pin(_k_minima(e, acc, mins))
    total = [e.zero() for _ in acc]
    for i, scale in enumerate(scales):

        def pieces(i: int = i) -> Pieces:
            for j in range(8):
                v, fifth = e.bytes(768 + (8 * (i // 2) + j) * 64), e.bytes(256 + 64 * j)
                yield (v & 15 if i % 2 == 0 else v >> 4) | (((fifth >> i) & 1) << 4), 32 * i + 4 * j

        total = e.pin(e.dots_scaled(total, scale, pieces(), 31))
    return _scaled_sums(e, acc, total, e.halves(0))


def _q6_k(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * (sum(q * x) - 32 sum(x))"""
    total = [e.zero() for _ in acc]
    for i in range(16):  # sub-block i: half i // 8 of the block, group i % 8 // 2 of 32 values, part i % 2
        half, group, part = i // 8, i % 8 // 2, i % 2

        def pieces(half: int = half, group: int = group, part: int = part) -> Pieces:
            for j in range(4):  # group g: nibble g // 2 of low bytes g % 2, and bits 2g, 2g + 1 of the high bytes
                low = e.bytes((16 * half + 8 * (group % 2) + 4 * part + j) * 64)
                high = e.bytes(2048 + (8 * half + 4 * part + j) * 64)
                two = high << (4 - 2 * group) if group < 2 else high >> (2 * group - 4)
                k = 128 * half + 32 * group + 16 * part + 4 * j
                yield (low & 15 if group < 2 else low >> 4) | (two & 48), k

        scale = e.signed_bytes(3072 + 16 * i)
        total = e.dots_scaled(total, scale, pieces(), 63)
        total = e.pin([value - (e.product(scale, e.sum(t, i)) << 5) for t, value in enumerate(total)])
    return _scaled_sums(e, acc, total, e.halves(3328))


@dataclass(frozen=True, slots=True)
class Layout:
    """How one format is interleaved: parts of a GGUF block as (first byte, last byte, unit), in R16 order.

    unit 4 interleaves the rows four bytes at a time, 2 two bytes (a float16), 1 byte by byte; `padding` zero bytes end
    the block. `sums` is how many activation sums it meets; `ahead`, how early weights are fetched, in bytes.
    """

    type: GGMLType
    micro: Callable[[Any, Values], Values]
    parts: tuple[tuple[int, int, int], ...]
    sums: int
    ahead: int
    padding: int = 0

    @property
    def elements(self) -> int:
        return FORMATS[self.type].elements

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of sixteen rows."""
        return 16 * FORMATS[self.type].bytes + self.padding


def _layouts() -> dict[str, Layout]:
    T = GGMLType
    layouts = (
        Layout(T.Q8_0, _q8_0, ((0, 2, 2), (2, 34, 4)), 1, 4096),
        Layout(T.Q4_0, _q4_0, ((0, 2, 2), (2, 18, 4)), 1, 4096),
        Layout(T.Q4_1, _q4_1, ((0, 2, 2), (2, 4, 2), (4, 20, 4)), 1, 4096),
        Layout(T.Q4_K, _q4_k, ((0, 2, 2), (2, 4, 2), (4, 16, 4), (16, 144, 4)), 16, 3072),
        Layout(T.Q5_K, _q5_k, ((0, 2, 2), (2, 4, 2), (4, 16, 4), (16, 48, 4), (48, 176, 4)), 16, 3072),
        Layout(T.Q6_K, _q6_k, ((0, 128, 4), (128, 192, 4), (192, 208, 1), (208, 210, 2)), 16, 3072, padding=32),
    )
    return {layout.type.name: layout for layout in layouts}


R16 = _layouts()
"""The formats that have a micro-kernel, by name."""


def repack(layout: Layout, raw: Bytes) -> Bytes:
    """Rows (N, row bytes) of GGUF blocks as R16 (ceil(N / 16), blocks, block_bytes); missing rows are zeros."""
    size = FORMATS[layout.type].bytes
    groups, blocks = -(-raw.shape[0] // 16), raw.shape[1] // size
    out = np.zeros((groups, blocks, layout.block_bytes), np.uint8)
    for group in range(groups):
        rows = raw[16 * group : 16 * group + 16].reshape(-1, blocks, size)
        at = 0
        for first, last, unit in layout.parts:
            count, width = (last - first) // unit, 16 * (last - first)
            target = out[group, :, at : at + width].reshape(blocks, count, 16, unit)
            target[:, :, : len(rows)] = rows[:, :, first:last].reshape(-1, blocks, count, unit).transpose(1, 2, 0, 3)
            at += width
    return out
