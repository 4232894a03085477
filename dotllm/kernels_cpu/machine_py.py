"""The machine that runs micro-kernels in Python: the definition of each instruction, checked against array bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.ops.float32 import fma, half_to_float

__all__ = ["PyMachine"]

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PyMachine:
    """One block of sixteen rows of weights at `at`, and the activations of the tokens in `rows` at block `block`.

    values (M * K,), scales (M * blocks,), sums (M * blocks * S,), offsets (M * K / 32,), all flat.
    """

    weights: NDArray[np.uint8]
    at: int
    elements: int
    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    sums: Ints
    offsets: NDArray[np.float32]
    rows: tuple[int, ...]
    block: int
    blocks: int
    sums_per_block: int

    def _read(self, array: NDArray[Any], first: int, count: int) -> NDArray[Any]:
        if first < 0 or first + count > array.size:
            raise IndexError(f"elements {first}..{first + count} lie outside an array of {array.size}")
        return array[first : first + count]

    def bytes(self, at: int) -> NDArray[np.uint8]:
        """Four weights of each of sixteen rows, unsigned: (64,)."""
        return self._read(self.weights, self.at + at, 64)

    def small(self, at: int) -> Ints:
        """One unsigned byte of each row as int32."""
        return self._read(self.weights, self.at + at, 16).astype(np.int32)

    def signed_small(self, at: int) -> Ints:
        """One signed byte of each row as int32."""
        return self._read(self.weights, self.at + at, 16).view(np.int8).astype(np.int32)

    def halves(self, at: int) -> NDArray[np.float32]:
        """A float16 of each row."""
        bits = np.ascontiguousarray(self._read(self.weights, self.at + at, 32)).view(np.uint16)
        return np.asarray(half_to_float(bits))

    def powers(self, at: int) -> NDArray[np.float32]:
        """2^(byte - 128) for one byte of each row."""
        return np.asarray(np.ldexp(np.ones(16, np.float32), self.small(at) - np.int32(128)))

    def _at(self, token: int) -> int:
        return self.rows[token] * self.blocks + self.block

    def scale(self, token: int) -> Any:
        """The scale of a token's block."""
        return self._read(self.scales, self._at(token), 1)[0]

    def offset(self, token: int) -> Any:
        """The rounded sum of a token's block of 32."""
        return self._read(self.offsets, self._at(token), 1)[0]

    def sum(self, token: int, index: int) -> Ints:
        """Sum `index` of a token's block."""
        return np.full(16, self._read(self.sums, self._at(token) * self.sums_per_block + index, 1)[0], np.int32)

    def zero(self) -> Ints:
        """Sixteen zeros."""
        return np.zeros(16, np.int32)

    def float(self, v: Ints) -> NDArray[np.float32]:
        """Int32 to float32."""
        return v.astype(np.float32)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c rounded once."""
        return fma(a, b, c)

    def product(self, a: Ints, b: Ints) -> Ints:
        """a * b; both fit in 16 bits."""
        return a * b

    def lookup16(self, v: NDArray[np.uint8], table: Sequence[int]) -> NDArray[np.uint8]:
        """table[v] as signed bytes, for bytes v below 16."""
        return np.asarray(table, np.int8).view(np.uint8)[v]

    def bit(self, v: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:
        """Bit `index` of every byte."""
        return (v >> np.uint8(index)) & np.uint8(1)

    def repeat(self, count: int, body: Callable[[int, list[Any]], list[Any]], carried: list[Any]) -> list[Any]:
        """carried = body(i, carried) for i = 0 .. count - 1: a loop that stays a loop when compiled."""
        for i in range(count):
            carried = body(i, carried)
        return carried

    def _dot(self, weights: NDArray[Any], token: int, first: int) -> Ints:
        at = (self.rows[token] * self.blocks + self.block) * self.elements + first
        quad = self._read(self.values, at, 4).astype(np.int32)
        total: Ints = (weights.reshape(16, 4).astype(np.int32) * quad).sum(axis=1, dtype=np.int32)
        return total

    def dots(self, pieces: Iterable[tuple[Any, int]], limit: int) -> list[Ints]:
        """For each token, the sum over pieces of weights (unsigned, at most `limit`) times activations."""
        return self.dots_scaled([self.zero() for _ in self.rows], np.int32(1), pieces, limit)

    def dots_signed(self, pieces: Iterable[tuple[Any, int]]) -> list[Ints]:
        """The same for signed weights; the pieces cover one sum of the block, sum 0."""
        return self.dots(((weights.view(np.int8), k) for weights, k in pieces), 127)

    def dots_signed_scaled(
        self, total: list[Ints], scale: Any, pieces: Iterable[tuple[Any, int]], sums: Iterable[int]
    ) -> list[Ints]:
        """`dots_scaled` for signed weights; the pieces cover the sums `sums` of the block."""
        return self.dots_scaled(total, scale, ((weights.view(np.int8), k) for weights, k in pieces), 127)

    def dots_scaled(self, total: list[Ints], scale: Any, pieces: Iterable[tuple[Any, int]], limit: int) -> list[Ints]:
        """total + scale * the sums of `dots`; the scale fits in 16 bits."""
        total = list(total)
        for weights, k in pieces:
            for token in range(len(total)):
                total[token] = total[token] + scale * self._dot(weights, token, k)
        return total
