"""The machine that compiles micro-kernels: running one emits its instructions, so its Python loops are the unrolling.

How a dot product of four bytes is done is all that differs between instruction sets:

    vnni      vpdpbusd: unsigned x signed bytes straight into int32 lanes (signed weights: + 128, less 128 sum(x))
    avx2      vpmaddubsw: pairs into int16, as many sums as cannot overflow, then vpmaddwd with the scale
              (signed weights: |w| and the activation with the sign of w)
    generic   shifts, multiplications and additions of int32 lanes
All are exact in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from dotllm.kernels_cpu.lanes_llvm import splat_value

__all__ = ["Block", "LLVMMachine", "Value"]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()
BYTES64, BYTES32 = ir.VectorType(I8, 64), ir.VectorType(I8, 32)
SHORTS, INTS8, INTS, FLOATS = (ir.VectorType(t, n) for t, n in ((I16, 16), (I32, 8), (I32, 16), (FLOAT, 16)))


class Value:
    """A vector, or an index, in LLVM with the operators that micro-kernels use."""

    __slots__ = ("builder", "v")

    def __init__(self, builder: Any, v: Any) -> None:
        self.builder, self.v = builder, v

    def _apply(self, other: Any, for_floats: str, for_integers: str) -> Value:
        kind = self.v.type
        if isinstance(other, Value):
            right = other.v
        else:
            right = ir.Constant(kind, [other] * kind.count if isinstance(kind, ir.VectorType) else other)
        name = for_floats if kind == FLOATS else for_integers
        return Value(self.builder, getattr(self.builder, name)(self.v, right))

    def __add__(self, other: Any) -> Value:
        return self._apply(other, "fadd", "add")

    def __sub__(self, other: Any) -> Value:
        return self._apply(other, "fsub", "sub")

    def __mul__(self, other: Any) -> Value:
        return self._apply(other, "fmul", "mul")

    def __and__(self, other: Any) -> Value:
        return self._apply(other, "", "and_")

    def __or__(self, other: Any) -> Value:
        return self._apply(other, "", "or_")

    def __rshift__(self, other: Any) -> Value:
        return self._apply(other, "", "lshr")

    def __lshift__(self, other: Any) -> Value:
        return self._apply(other, "", "shl")


@dataclass(frozen=True, slots=True)
class Block:
    """Addresses (int64 values in LLVM) of one block: its weights, and of each token values, scale, sums and offset."""

    weights: Any
    values: list[Any]
    scales: list[Any]
    sums: list[Any]
    offsets: list[Any]


class LLVMMachine:
    """The instructions of `PyMachine`, emitted at `builder` for one block."""

    def __init__(self, builder: Any, isa: str, block: Block) -> None:
        self.builder, self.isa, self.block = builder, isa, block

    def _value(self, v: Any) -> Value:
        return Value(self.builder, v)

    def _load(self, address: Any, offset: int | Value, kind: Any) -> Any:
        step = offset.v if isinstance(offset, Value) else I64(offset)
        value = self.builder.load(self.builder.inttoptr(self.builder.add(address, step), kind.as_pointer()))
        value.align = 1
        return value

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def prefetch(self, ahead: int, size: int) -> None:
        """Ask for the weights `ahead` bytes further on, as many as this block has."""
        for offset in range(0, size, 64):
            address = self.builder.add(self.block.weights, I64(ahead + offset))
            pointer = self.builder.inttoptr(address, I8.as_pointer())
            self._call("llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))

    # ---- reading
    def bytes(self, at: int | Value) -> Value:
        return self._value(self._load(self.block.weights, at, BYTES64))

    def small(self, at: int | Value) -> Value:
        return self._value(self.builder.zext(self._load(self.block.weights, at, ir.VectorType(I8, 16)), INTS))

    def signed_small(self, at: int | Value) -> Value:
        return self._value(self.builder.sext(self._load(self.block.weights, at, ir.VectorType(I8, 16)), INTS))

    def halves(self, at: int | Value) -> Value:
        return self._value(self.builder.fpext(self._load(self.block.weights, at, ir.VectorType(HALF, 16)), FLOATS))

    def powers(self, at: int | Value) -> Value:
        byte = self.small(at)
        normal, denormal = (byte - 1) << 23, ((byte & 1) + 1) << 21  # denormal where byte is 0 or 1
        tiny = self.builder.icmp_unsigned("<", byte.v, ir.Constant(INTS, [2] * 16))
        return self._value(self.builder.bitcast(self.builder.select(tiny, denormal.v, normal.v), FLOATS))

    def scale(self, token: int) -> Value:
        return self._value(splat_value(self.builder, self._load(self.block.scales[token], 0, FLOAT)))

    def offset(self, token: int) -> Value:
        return self._value(splat_value(self.builder, self._load(self.block.offsets[token], 0, FLOAT)))

    def sum(self, token: int, index: int | Value) -> Value:
        return self._value(splat_value(self.builder, self._load(self.block.sums[token], index * 4, I32)))

    # ---- arithmetic
    def zero(self) -> Value:
        return self._value(ir.Constant(INTS, [0] * 16))

    def float(self, v: Value) -> Value:
        return self._value(self.builder.sitofp(v.v, FLOATS))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self._value(self._call("llvm.fma.v16f32", FLOATS, a.v, b.v, c.v))

    def product(self, a: Value, b: Value) -> Value:
        if self.isa != "avx2":
            return a * b
        low = self.builder.bitcast((a & 0xFFFF).v, ir.VectorType(I16, 32))  # vpmulld is slow; the other halves are 0
        return self._value(self._pairs(low, self.builder.bitcast(b.v, ir.VectorType(I16, 32))))

    def bit(self, v: Value, index: Value) -> Value:
        words = self._value(self.builder.bitcast(v.v, INTS))
        count = splat_value(self.builder, self.builder.trunc(index.v, I32))
        return self._value(self.builder.bitcast(((words >> self._value(count)) & 0x01010101).v, BYTES64))

    def lookup16(self, v: Value, table: Sequence[int]) -> Value:
        if self.isa == "generic":
            return self._value(self._choose16(v, table))
        codes = ir.Constant(
            BYTES64, [value & 255 for value in table] * 4
        )  # the instruction looks up 16 bytes at a time
        if self.isa == "vnni":
            return self._value(self._call("llvm.x86.avx512.pshuf.b.512", BYTES64, codes, v.v))
        parts = zip(self._halves(codes), self._halves(v.v), strict=True)
        return self._value(self._join(*(self._call("llvm.x86.avx2.pshuf.b", BYTES32, x, y) for x, y in parts)))

    def _choose16(self, v: Value, table: Sequence[int]) -> Any:
        """Halve the table by each bit of v in turn, the lowest first."""
        zero = ir.Constant(BYTES64, [0] * 64)
        left = [ir.Constant(BYTES64, [value & 255] * 64) for value in table]
        for bit in (1, 2, 4, 8):
            odd = self.builder.icmp_unsigned("!=", (v & bit).v, zero)
            left = [self.builder.select(odd, b, a) for a, b in zip(left[::2], left[1::2], strict=True)]
        return left[0]

    def repeat(
        self, count: int, body: Callable[[Value, list[Value]], list[Value]], carried: list[Value]
    ) -> list[Value]:
        builder = self.builder
        before = builder.block
        inside, after = builder.append_basic_block("repeat"), builder.append_basic_block("repeated")
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(I64)
        values = [builder.phi(value.v.type) for value in carried]
        results = body(self._value(index), [self._value(value) for value in values])
        following = builder.add(index, I64(1))
        for phi, first, last in zip(
            [index, *values], [I64(0), *(c.v for c in carried)], [following, *(r.v for r in results)], strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(last, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, I64(count)), inside, after)
        builder.position_at_end(after)
        return results

    def _halves(self, v: Any) -> list[Any]:
        n = v.type.count // 2
        undefined = ir.Constant(v.type, ir.Undefined)
        return [
            self.builder.shuffle_vector(v, undefined, ir.Constant(ir.VectorType(I32, n), list(range(at, at + n))))
            for at in (0, n)
        ]

    def _join(self, low: Any, high: Any) -> Any:
        n = 2 * low.type.count
        return self.builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, n), list(range(n))))

    # ---- dot products
    def dots(self, pieces: Iterable[tuple[Value, int | Value]], limit: int) -> list[Value]:
        zeros = [self.zero() for _ in self.block.values]
        if self.isa == "avx2":
            return self._dots_avx2(zeros, None, pieces, limit)
        return self._dots_wide(zeros, pieces)

    def dots_signed(self, pieces: Iterable[tuple[Value, int | Value]]) -> list[Value]:
        return self.dots_signed_scaled([self.zero() for _ in self.block.values], None, pieces, [0])

    def dots_signed_scaled(
        self,
        total: list[Value],
        scale: Value | None,
        pieces: Iterable[tuple[Value, int | Value]],
        sums: Iterable[int | Value],
    ) -> list[Value]:
        if self.isa == "avx2":
            return self._dots_avx2(total, scale, pieces, None)
        shifted = ((self._value(self.builder.xor(v.v, ir.Constant(BYTES64, [128] * 64))), k) for v, k in pieces)
        parts = self._dots_wide([self.zero() for _ in total], shifted)
        for index in sums:
            parts = [part - (self.sum(token, index) << 7) for token, part in enumerate(parts)]
        return [total[token] + (part if scale is None else scale * part) for token, part in enumerate(parts)]

    def dots_scaled(
        self, total: list[Value], scale: Value, pieces: Iterable[tuple[Value, int | Value]], limit: int
    ) -> list[Value]:
        if self.isa == "avx2":
            return self._dots_avx2(total, scale, pieces, limit)
        parts = self._dots_wide([self.zero() for _ in total], pieces)
        return [total[token] + scale * part for token, part in enumerate(parts)]

    def _quad(self, token: int, first: int | Value) -> Any:
        return self._load(self.block.values[token], first, I32)

    def _dots_wide(self, acc: list[Value], pieces: Iterable[tuple[Value, int | Value]]) -> list[Value]:
        for weights, first in pieces:
            for token in range(len(acc)):
                word = splat_value(self.builder, self._quad(token, first))
                acc[token] = (
                    self._vpdpbusd(acc[token], weights, word)
                    if self.isa == "vnni"
                    else self._plain(acc[token], weights, word)
                )
        return acc

    def _vpdpbusd(self, acc: Value, weights: Value, word: Any) -> Value:
        kind = BYTES64 if binding.llvm_version_info[0] >= 22 else INTS  # byte vectors since LLVM 22
        u, s = self.builder.bitcast(weights.v, kind), self.builder.bitcast(word, kind)
        return self._value(self._call("llvm.x86.avx512.vpdpbusd.512", INTS, acc.v, u, s))

    def _plain(self, acc: Value, weights: Value, word: Any) -> Value:
        four = self._value(self.builder.bitcast(weights.v, INTS))
        for i in range(4):
            left, right = (ir.Constant(INTS, [n] * 16) for n in (24 - 8 * i, 24))
            signed = self._value(self.builder.ashr(self.builder.shl(word, left), right))
            acc = acc + ((four >> (8 * i)) & 255) * signed
        return acc

    def _pairs(self, a: Any, b: Any) -> Any:
        """vpmaddwd on 32 shorts: a[2i] b[2i] + a[2i+1] b[2i+1] as sixteen int32."""
        parts = zip(self._halves(a), self._halves(b), strict=True)
        return self._join(*(self._call("llvm.x86.avx2.pmadd.wd", INTS8, x, y) for x, y in parts))

    def _dots_avx2(
        self, total: list[Value], scale: Value | None, pieces: Iterable[tuple[Value, int | Value]], limit: int | None
    ) -> list[Value]:
        """`limit` None means signed weights; int16 holds 32767 // (2 * 127 * limit) products of pairs."""
        factor = ir.Constant(ir.VectorType(I16, 32), [1] * 32)
        if scale is not None:
            factor = self.builder.bitcast(((scale & 0xFFFF) | (scale << 16)).v, ir.VectorType(I16, 32))
        room = 1 if limit is None else 32767 // (2 * 127 * limit)
        shorts: list[Any] = []
        for weights, first in pieces:
            new = [self._maddubs(weights, token, first, limit is None) for token in range(len(total))]
            shorts = [self.builder.add(a, b) for a, b in zip(shorts, new, strict=True)] if shorts else new
            room -= 1
            if room == 0:
                total = self._flush(total, shorts, factor)
                shorts, room = [], 1 if limit is None else 32767 // (2 * 127 * limit)
        return self._flush(total, shorts, factor) if shorts else total

    def _flush(self, total: list[Value], shorts: list[Any], factor: Any) -> list[Value]:
        return [value + self._value(self._pairs(part, factor)) for value, part in zip(total, shorts, strict=True)]

    def _maddubs(self, weights: Value, token: int, first: int | Value, signed: bool) -> Any:
        eight = ir.VectorType(I32, 8)
        word = self._quad(token, first)
        one = self.builder.insert_element(ir.Constant(eight, ir.Undefined), word, I32(0))
        splat = self.builder.shuffle_vector(one, ir.Constant(eight, ir.Undefined), ir.Constant(eight, [0] * 8))
        activations = self.builder.bitcast(splat, BYTES32)
        parts = []
        for half in self._halves(weights.v):
            u, s = half, activations
            if signed:
                u = self._call("llvm.abs.v32i8", BYTES32, half, ir.IntType(1)(0))
                s = self._call("llvm.x86.avx2.psign.b", BYTES32, activations, half)
            parts.append(self._call("llvm.x86.avx2.pmadd.ub.sw", SHORTS, u, s))
        return self._join(*parts)
