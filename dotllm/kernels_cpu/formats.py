"""R16: quantised weights with sixteen output rows interleaved, and one micro-kernel per format.

    GGUF   row 0: |block 0|block 1|..     R16   |block 0 of rows 0-15|block 1 of rows 0-15|..   then rows 16-31
           row 1: |block 0|block 1|..            d x 16 | .. | q[0:4] of row 0, of row 1, ..., of row 15 | q[4:8] ..

A vector then holds four neighbouring values of sixteen rows. Four activations, broadcast, meet it in one integer dot
product, lane r gathers row r, and no sum ever crosses lanes: the order of summation is one and the same for every
number of tokens. The bytes are those of the GGUF block in another order (K-quants: up to 4 % more of them).

A micro-kernel adds one block to the float accumulators of T tokens. It is written once over a machine `e`: compiled by
`machine_llvm`, run in Python by `machine_py`. Integer sums are exact, so every instruction set gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.dequantize import IQ4_VALUES, MXFP4_VALUES
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


def _nibbles(e: Any, at: Any, first: Any = 0) -> Pieces:
    """Sixteen bytes a row: values 0-15 from `first` in the low nibbles, 16-31 in the high ones."""
    for j in range(4):
        v = e.bytes(at + 64 * j)
        yield v & 15, first + 4 * j
        yield v >> 4, first + (16 + 4 * j)


def _fives(e: Any, at: int) -> Pieces:
    """Nibbles after four bytes a row of fifth bits, of which bit i belongs to values 4i .. 4i + 3."""
    fifths = e.bytes(at)
    for i, (low, first) in enumerate(_nibbles(e, at + 64)):
        fifth = fifths >> i // 2 if i % 2 else fifths << 4 - i // 2
        yield low | (fifth & 16), first


def _from_table(e: Any, table: tuple[int, ...], pieces: Pieces) -> Pieces:
    for codes, first in pieces:
        yield e.lookup16(codes, table), first


def _q4_0(e: Any, acc: Values) -> Values:
    """y += d * dx * (sum(q * x) - 8 sum(x))"""
    parts = e.dots(_nibbles(e, 32), 15)
    return _scaled_sums(e, acc, [part - (e.sum(t, 0) << 3) for t, part in enumerate(parts)], e.halves(0))


def _q4_1(e: Any, acc: Values) -> Values:
    """y += d * dx * sum(q * x) + m * offset"""
    acc = _scaled_sums(e, acc, e.dots(_nibbles(e, 64), 15), e.halves(0))
    m = e.halves(32)
    return [e.fma(m, e.offset(t), value) for t, value in enumerate(acc)]


def _q5_0(e: Any, acc: Values) -> Values:
    """y += d * dx * (sum(q * x) - 16 sum(x))"""
    parts = e.dots(_fives(e, 32), 31)
    return _scaled_sums(e, acc, [part - (e.sum(t, 0) << 4) for t, part in enumerate(parts)], e.halves(0))


def _q5_1(e: Any, acc: Values) -> Values:
    """y += d * dx * sum(q * x) + m * offset"""
    acc = _scaled_sums(e, acc, e.dots(_fives(e, 64), 31), e.halves(0))
    m = e.halves(32)
    return [e.fma(m, e.offset(t), value) for t, value in enumerate(acc)]


def _iq4_nl(e: Any, acc: Values) -> Values:
    """y += d * dx * sum(table[q] * x)"""
    return _scaled_sums(e, acc, e.dots_signed(_from_table(e, IQ4_VALUES, _nibbles(e, 32))), e.halves(0))


def _mxfp4(e: Any, acc: Values) -> Values:
    """y += d * dx * (sum((table[q] + 12) * x) - 12 sum(x))"""
    parts = e.dots(_from_table(e, tuple(value + 12 for value in MXFP4_VALUES), _nibbles(e, 16)), 24)
    parts = [part - (e.sum(t, 0) << 3) - (e.sum(t, 0) << 2) for t, part in enumerate(parts)]
    return _scaled_sums(e, acc, parts, e.powers(0))


def _iq4_xs(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * sum(table[q] * x)"""

    def add(i: Any, total: Any) -> Any:
        pieces = _from_table(e, IQ4_VALUES, _nibbles(e, i * 256 + 160, i * 32))
        return e.dots_signed_scaled(total, e.signed_small(i * 16 + 32), pieces, (i * 2, i * 2 + 1))

    return _scaled_sums(e, acc, e.repeat(8, add, [e.zero() for _ in acc]), e.halves(0))


def _less_minima(e: Any, acc: Values, count: int, product: Callable[[int, Any], Any], dmin: Any) -> Values:
    """y -= dmin * dx * sum over sub-blocks of min * sum(x), which is product(token, sub-block)"""

    def add(i: Any, lows: Any) -> Any:
        return [low + product(t, i) for t, low in enumerate(lows)]

    lows = e.repeat(count, add, [e.zero() for _ in acc])
    return [value - e.float(lows[t]) * (dmin * e.scale(t)) for t, value in enumerate(acc)]


def _k_minima(e: Any, acc: Values) -> Values:
    """Of Q4_K and Q5_K: a minimum for 32 values"""

    def product(t: int, i: Any) -> Any:
        return e.product(e.small(i * 16 + 192), e.sum(t, i * 2) + e.sum(t, i * 2 + 1))

    return _less_minima(e, acc, 8, product, e.halves(32))


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


def _two_bits(e: Any, at: int, half: Any, group: int, part: int) -> Pieces:
    """Q2_K and Q3_K: 64 bytes a row; in each half, bits 2g, 2g + 1 of 32 bytes are group g."""
    for j in range(4):
        v = e.bytes(half * 512 + (at + (4 * part + j) * 64))
        yield (v >> (2 * group)) & 3, half * 128 + (32 * group + 16 * part + 4 * j)


def _q2_k(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * sum(q * x), less the minima; a byte holds scale and minimum"""

    def add(half: Any, total: Values) -> Values:
        for group in range(4):
            for part in range(2):
                scale = e.small(half * 128 + (32 * group + 16 * part)) & 15
                total = e.dots_scaled(total, scale, _two_bits(e, 256, half, group, part), 3)
        return total

    def product(t: int, i: Any) -> Any:
        return e.product(e.small(i * 16) >> 4, e.sum(t, i))

    total = e.repeat(2, add, [e.zero() for _ in acc])
    return _scaled_sums(e, _less_minima(e, acc, 16, product, e.halves(1312)), total, e.halves(1280))


def _centred(e: Any, acc: Values, pieces: Callable[[Any, int, int], Pieces], bits: int, scales: int) -> Values:
    """sum over sub-blocks of scale * (sum(q * x) - 2^(bits - 1) sum(x)), for each token"""

    def add(half: Any, total: Values) -> Values:  # 128 values: four groups of 32, each two sub-blocks of 16
        for group in range(4):
            for part in range(2):
                scale = e.signed_small(half * 128 + (scales + 32 * group + 16 * part))
                sums = [e.sum(t, half * 8 + (2 * group + part)) for t in range(len(total))]
                less = [e.product(scale, value) << (bits - 1) for value in sums]
                total = e.dots_scaled(total, scale, pieces(half, group, part), 2**bits - 1)
                total = [value - less[t] for t, value in enumerate(total)]
        return total

    return list(e.repeat(2, add, [e.zero() for _ in acc]))


def _q3_k(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * (sum(q * x) - 4 sum(x))"""

    def pieces(half: Any, group: int, part: int) -> Pieces:
        bit = 4 * part + group
        for j, (two, first) in enumerate(_two_bits(e, 512, half, group, part)):
            third = e.bytes(half * 256 + 64 * j)  # 16 bytes a row for each half: bit 4 part + group
            yield two | ((third >> bit - 2 if bit > 2 else third << 2 - bit) & 4), first

    return _scaled_sums(e, acc, _centred(e, acc, pieces, 3, 1536), e.halves(1792))


def _q6_k(e: Any, acc: Values) -> Values:
    """y += d * dx * sum over sub-blocks of scale * (sum(q * x) - 32 sum(x))"""

    def pieces(half: Any, group: int, part: int) -> Pieces:
        for j in range(4):  # group g: nibble g // 2 of low bytes g % 2, and bits 2g, 2g + 1 of the high bytes
            low = e.bytes(half * 1024 + (8 * (group % 2) + 4 * part + j) * 64)
            high = e.bytes(half * 512 + (2048 + (4 * part + j) * 64))
            two = high << (4 - 2 * group) if group < 2 else high >> (2 * group - 4)
            yield (low & 15 if group < 2 else low >> 4) | (two & 48), half * 128 + (32 * group + 16 * part + 4 * j)

    return _scaled_sums(e, acc, _centred(e, acc, pieces, 6, 3072), e.halves(3328))


@dataclass(frozen=True, slots=True)
class Layout:
    """How one format is interleaved: parts of a GGUF block as (first byte, last byte, unit), in R16 order.

    Before that, `expand` may rewrite the blocks (K-quants: 6-bit scales as bytes; Q5: fifth bits in another order).
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


def _expand_iq4_xs(rows: Bytes) -> Bytes:
    """Blocks d upper_scale_bits[2] lower_scale_bits[4] .. as d scale[8] .., signed."""
    lower = np.stack([rows[..., 4:8] & 15, rows[..., 4:8] >> 4], axis=-1).reshape(*rows.shape[:-1], 8)
    upper = (rows[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(*rows.shape[:-1], 8) & 3
    return np.concatenate([rows[..., :2], (lower | (upper << 4)) - np.uint8(32), rows[..., 8:]], axis=-1)


def _expand_q3_k(rows: Bytes) -> Bytes:
    """Blocks third_bits[32] pairs[64] packed[12] d as third_bits[32], by halves, pairs[64] scale[16], signed, d."""
    first, second = rows[..., :16], rows[..., 16:32]
    thirds = [(first & 15) | (second << 4), (first >> 4) | (second & 240)]
    low, high = rows[..., 96:104], rows[..., 104:108]
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = (np.concatenate([low & 15, low >> 4], axis=-1) | (upper << 4)) - np.uint8(32)
    return np.concatenate([*thirds, rows[..., 32:96], scales, rows[..., 108:]], axis=-1)


def _order_fifths(rows: Bytes, at: int) -> Bytes:
    """32 bits from byte `at` on in another order: bit i of byte b belongs to value 4i + b, instead of 8b + i."""
    words, ordered = rows[..., at : at + 4].copy().view("<u4"), rows.copy()
    for b in range(4):
        bits = (words >> b) & 0x11111111
        bits = (bits | bits >> 3) & 0x03030303
        bits = (bits | bits >> 6) & 0x000F000F
        ordered[..., at + b] = (bits | bits >> 12)[..., 0] & 255
    return ordered


def _layouts() -> dict[str, Layout]:
    T = GGMLType
    two, four = ((0, 2, 2),), ((0, 2, 2), (2, 4, 2))  # d; d and m
    layouts = (
        Layout(T.Q8_0, _q8_0, (*two, (2, 34, 4)), 1, 4096),
        Layout(T.Q4_0, _q4_0, (*two, (2, 18, 4)), 1, 4096),
        Layout(T.Q4_1, _q4_1, (*four, (4, 20, 4)), 1, 4096),
        Layout(T.Q5_0, _q5_0, (*two, (2, 22, 4)), 1, 4096, expand=lambda rows: _order_fifths(rows, 2)),
        Layout(T.Q5_1, _q5_1, (*four, (4, 24, 4)), 1, 4096, expand=lambda rows: _order_fifths(rows, 4)),
        Layout(T.IQ4_NL, _iq4_nl, (*two, (2, 18, 4)), 1, 4096),
        Layout(T.MXFP4, _mxfp4, ((0, 1, 1), (1, 17, 4)), 1, 4096),
        Layout(T.IQ4_XS, _iq4_xs, (*two, (2, 10, 1), (10, 138, 4)), 16, 3072, expand=_expand_iq4_xs),
        Layout(T.Q2_K, _q2_k, ((0, 16, 1), (16, 80, 4), (80, 82, 2), (82, 84, 2)), 16, 3072),
        Layout(T.Q3_K, _q3_k, ((0, 96, 4), (96, 112, 1), (112, 114, 2)), 16, 3072, expand=_expand_q3_k),
        Layout(T.Q4_K, _q4_k, (*four, (4, 20, 1), (20, 148, 4)), 16, 3072, expand=_expand_scales),
        Layout(T.Q5_K, _q5_k, (*four, (4, 20, 1), (20, 180, 4)), 16, 3072, expand=_expand_scales),
        Layout(T.Q6_K, _q6_k, ((0, 192, 4), (192, 208, 1), (208, 210, 2)), 16, 3072, padding=32),
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
