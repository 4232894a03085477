"""The compiled forms behind `lanes`: each primitive as LLVM instructions on <16 x float>, unchecked.

An overload refuses (a typing error at compile time) anything but float32 and vectors, so that no float64 creeps in.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

from dotllm.kernels_cpu.lanes_py import (
    WIDTH,
    lane16,
    load16,
    load16_bfloat,
    load16_half,
    peak16,
    splat16,
    store16,
    store16_half,
    store16_int8,
    sum16,
    zero16,
)
from dotllm.ops import float32

__all__ = ["F32x16", "f32x16", "splat_value"]

I16, I32, HALF, FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


class F32x16(types.Type):
    """The Numba type of a vector of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(FLOAT, WIDTH))


f32x16 = F32x16()


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, to: ir.Type) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def _load_instruction(context: Any, builder: Any, signature: Any, args: Any, element: ir.Type) -> Any:
    pointer = _pointer(context, builder, signature.args[0], args[0], args[1], ir.VectorType(element, WIDTH))
    value = builder.load(pointer)
    value.align = 4 if element is FLOAT else 2
    return value


@intrinsic
def _load(typingctx: Any, array: Any, index: Any) -> Any:
    return f32x16(array, types.intp), lambda c, b, s, a: _load_instruction(c, b, s, a, FLOAT)


@intrinsic
def _load_half(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _load_instruction(context, builder, signature, args, HALF)
        return builder.fpext(value, ir.VectorType(FLOAT, WIDTH))

    return f32x16(array, types.intp), codegen


@intrinsic
def _load_bfloat(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.VectorType(I32, WIDTH)
        value = builder.zext(_load_instruction(context, builder, signature, args, I16), wide)
        return builder.bitcast(builder.shl(value, ir.Constant(wide, [16] * WIDTH)), ir.VectorType(FLOAT, WIDTH))

    return f32x16(array, types.intp), codegen


@intrinsic
def _store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], ir.VectorType(FLOAT, WIDTH))
        builder.store(args[2], pointer).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def _store_half(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = ir.VectorType(HALF, WIDTH)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], halves)
        builder.store(builder.fptrunc(args[2], halves), pointer).align = 2
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def _store_int8(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes16 = ir.VectorType(ir.IntType(8), WIDTH)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], bytes16)
        wide = builder.fptosi(args[2], ir.VectorType(I32, WIDTH))
        builder.store(builder.trunc(wide, bytes16), pointer).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def _lane(typingctx: Any, v: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], I32))

    return types.float32(f32x16, types.intp), codegen


def splat_value(builder: Any, scalar: Any) -> Any:
    """Sixteen copies of a scalar in LLVM."""
    vector = ir.VectorType(scalar.type, WIDTH)
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH))


@intrinsic
def _splat(typingctx: Any, x: Any) -> Any:
    return f32x16(types.float32), lambda context, builder, signature, args: splat_value(builder, args[0])


def _fold(builder: Any, value: Any, combine: Any) -> Any:
    for half in (8, 4, 2, 1):
        undefined = ir.Constant(value.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(
                value, undefined, ir.Constant(ir.VectorType(I32, half), list(range(start, start + half)))
            )
            for start in (0, half)
        )
        value = combine(builder, low, high)
    return builder.extract_element(value, I32(0))


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", b, a), a, b)


@intrinsic
def _sum(typingctx: Any, v: Any) -> Any:
    return types.float32(f32x16), lambda c, b, s, args: _fold(b, args[0], lambda builder, x, y: builder.fadd(x, y))


@intrinsic
def _peak(typingctx: Any, v: Any) -> Any:
    return types.float32(f32x16), lambda c, b, s, args: _fold(b, args[0], _greater)


def _if(condition: bool, implementation: Any) -> Any:
    return implementation if condition else None


def _reads(array: Any, dtype: Any) -> bool:
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype == dtype


def _writes(array: Any, dtype: Any, value: Any) -> bool:
    return _reads(array, dtype) and array.mutable and value == f32x16


# Lambdas, because Numba wants both signatures equal to the last annotation.
overload(load16)(lambda array, index: _if(_reads(array, types.float32), lambda array, index: _load(array, index)))
overload(load16_half)(
    lambda array, index: _if(_reads(array, types.uint16), lambda array, index: _load_half(array, index))
)
overload(load16_bfloat)(
    lambda array, index: _if(_reads(array, types.uint16), lambda array, index: _load_bfloat(array, index))
)
overload(store16)(
    lambda array, index, value: _if(
        _writes(array, types.float32, value), lambda array, index, value: _store(array, index, value)
    )
)
overload(store16_half)(
    lambda array, index, value: _if(
        _writes(array, types.uint16, value), lambda array, index, value: _store_half(array, index, value)
    )
)
overload(store16_int8)(
    lambda array, index, value: _if(
        _writes(array, types.int8, value), lambda array, index, value: _store_int8(array, index, value)
    )
)
overload(lane16)(lambda v, index: _if(v == f32x16, lambda v, index: _lane(v, index)))
overload(splat16)(lambda x: _if(x == types.float32, lambda x: _splat(x)))
overload(zero16)(lambda: lambda: _splat(np.float32(0.0)))
overload(sum16)(lambda v: _if(v == f32x16, lambda v: _sum(v)))
overload(peak16)(lambda v: _if(v == f32x16, lambda v: _peak(v)))


# ---- elementwise: each works on a float32 and on a vector
def _intrinsic_call(builder: Any, name: str, *values: Any) -> Any:
    kind = values[0].type
    suffix = f"v{WIDTH}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = ir.FunctionType(kind, [kind] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{suffix}"), values)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * WIDTH if isinstance(kind, ir.VectorType) else value)


def _as_bits(kind: Any) -> Any:
    return ir.VectorType(I32, WIDTH) if isinstance(kind, ir.VectorType) else I32


def _emit_pow2(builder: Any, n: Any) -> Any:
    bits = _as_bits(n.type)
    integer = builder.bitcast(builder.fadd(n, _constant(n.type, 12582912.0)), bits)
    return builder.bitcast(builder.shl(builder.add(integer, _constant(bits, 127)), _constant(bits, 23)), n.type)


def _emit_exponent(builder: Any, x: Any) -> Any:
    bits = _as_bits(x.type)
    shifted = builder.sub(builder.bitcast(x, bits), _constant(bits, 0x3F3504F3))
    return builder.sitofp(builder.ashr(shifted, _constant(bits, 23)), x.type)


def _emit_round_half(builder: Any, x: Any) -> Any:
    half = ir.VectorType(HALF, WIDTH) if isinstance(x.type, ir.VectorType) else HALF
    return builder.fpext(builder.fptrunc(x, half), x.type)


def _same(*kinds: Any) -> Any:
    """The common type of the arguments if it is float32 or a vector, else None: nothing is converted silently."""
    first = kinds[0]
    return first if first in (types.float32, f32x16) and all(kind == first for kind in kinds) else None


def _elementwise1(emit: Any) -> Any:
    @intrinsic
    def primitive(typingctx: Any, a: Any) -> Any:
        kind = _same(a)
        return (kind(kind), lambda c, builder, s, args: emit(builder, *args)) if kind else None

    return primitive


def _elementwise2(emit: Any) -> Any:
    @intrinsic
    def primitive(typingctx: Any, a: Any, b: Any) -> Any:
        kind = _same(a, b)
        return (kind(kind, kind), lambda c, builder, s, args: emit(builder, *args)) if kind else None

    return primitive


@intrinsic
def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    kind = _same(a, b, c)
    return (kind(kind, kind, kind), lambda _, b, s, args: _intrinsic_call(b, "fma", *args)) if kind else None


@intrinsic
def _where_less(typingctx: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    kind = _same(a, b, x, y)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return (kind(kind, kind, kind, kind), codegen) if kind else None


_add = _elementwise2(lambda builder, a, b: builder.fadd(a, b))
_subtract = _elementwise2(lambda builder, a, b: builder.fsub(a, b))
_multiply = _elementwise2(lambda builder, a, b: builder.fmul(a, b))
_div = _elementwise2(lambda builder, a, b: builder.fdiv(a, b))
_maximum = _elementwise2(_greater)
_minimum = _elementwise2(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
_sqrt = _elementwise1(lambda builder, a: _intrinsic_call(builder, "sqrt", a))
_rint = _elementwise1(lambda builder, a: _intrinsic_call(builder, "rint", a))
_absolute = _elementwise1(lambda builder, a: _intrinsic_call(builder, "fabs", a))
_pow2 = _elementwise1(_emit_pow2)
_round_half = _elementwise1(_emit_round_half)
_exponent_of = _elementwise1(_emit_exponent)


def _vector_operator(symbol: Any, implementation: Any) -> None:
    overload(symbol)(lambda a, b: implementation if _same(a, b) == f32x16 else None)


_vector_operator(operator.add, lambda a, b: _add(a, b))
_vector_operator(operator.sub, lambda a, b: _subtract(a, b))
_vector_operator(operator.mul, lambda a, b: _multiply(a, b))
overload(float32.fma)(lambda a, b, c: lambda a, b, c: _fma(a, b, c))
overload(float32.where_less)(lambda a, b, x, y: lambda a, b, x, y: _where_less(a, b, x, y))
overload(float32.div)(lambda a, b: lambda a, b: _div(a, b))
overload(float32.maximum)(lambda a, b: lambda a, b: _maximum(a, b))
overload(float32.minimum)(lambda a, b: lambda a, b: _minimum(a, b))
overload(float32.sqrt)(lambda a: lambda a: _sqrt(a))
overload(float32.rint)(lambda a: lambda a: _rint(a))
overload(float32.absolute)(lambda a: lambda a: _absolute(a))
overload(float32.round_half)(lambda x: lambda x: _round_half(x))
overload(float32.pow2)(lambda n: lambda n: _pow2(n))
overload(float32.exponent_of)(lambda x: lambda x: _exponent_of(x))


overload(float32.like)(
    lambda x, value: (
        _if(x == types.float32, lambda x, value: np.float32(value))
        or _if(x == f32x16, lambda x, value: _splat(np.float32(value)))
    )
)


# ---- scalar conversions
def _bitcast(source: Any, target: Any, emit: Any) -> Any:
    @intrinsic
    def conversion(typingctx: Any, x: Any) -> Any:
        return target(source), lambda context, builder, signature, args: emit(builder, args[0])

    return conversion


def _emit_to_bfloat(builder: Any, x: Any) -> Any:
    bits = builder.bitcast(x, I32)
    high = builder.lshr(bits, I32(16))
    rounded = builder.lshr(builder.add(builder.add(bits, I32(0x7FFF)), builder.and_(high, I32(1))), I32(16))
    result = builder.select(builder.fcmp_unordered("uno", x, x), builder.or_(high, I32(64)), rounded)
    return builder.trunc(result, I16)


_to_bits = _bitcast(types.float32, types.int32, lambda b, x: b.bitcast(x, I32))
_from_bits = _bitcast(types.int32, types.float32, lambda b, x: b.bitcast(x, FLOAT))
_from_half = _bitcast(types.uint16, types.float32, lambda b, x: b.fpext(b.bitcast(x, HALF), FLOAT))
_to_half = _bitcast(types.float32, types.uint16, lambda b, x: b.bitcast(b.fptrunc(x, HALF), I16))
_to_bfloat = _bitcast(types.float32, types.uint16, _emit_to_bfloat)
_from_bfloat = _bitcast(types.uint16, types.float32, lambda b, x: b.bitcast(b.shl(b.zext(x, I32), I32(16)), FLOAT))

overload(float32.float_to_bits)(lambda x: _if(x == types.float32, lambda x: _to_bits(x)))
overload(float32.bits_to_float)(lambda bits: _if(bits == types.int32, lambda bits: _from_bits(bits)))
overload(float32.half_to_float)(lambda bits: _if(bits == types.uint16, lambda bits: _from_half(bits)))
overload(float32.float_to_half)(lambda x: _if(x == types.float32, lambda x: _to_half(x)))
overload(float32.bfloat_to_float)(lambda bits: _if(bits == types.uint16, lambda bits: _from_bfloat(bits)))
overload(float32.float_to_bfloat)(lambda x: _if(x == types.float32, lambda x: _to_bfloat(x)))
