"""Products of interleaved weights with the activations of up to four tokens, as values inside kernels.

    tile(format, isa, T, weights, at, blocks, values, scales, sums, offsets, rows) -> T vectors

Sixteen output rows starting at byte `at` of R16 weights, for the T tokens whose rows of activations are `rows`.
format, isa and T are literals: each combination is compiled where it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic, overload

from dotllm.kernels_cpu.formats import R16
from dotllm.kernels_cpu.lanes import f32x16
from dotllm.kernels_cpu.machine_llvm import Block, LLVMMachine, Value
from dotllm.kernels_cpu.machine_py import PyMachine

__all__ = ["block_bytes", "tile"]

I64 = ir.IntType(64)


def _block_bytes_in_python(format: str) -> int:
    """Bytes of one block of sixteen rows."""
    return R16[format].block_bytes


def _start_in_python(T: int) -> Any:
    """T accumulators of zeros."""
    return tuple(np.zeros(16, np.float32) for _ in range(T))


def _block_in_python(
    format: str,
    isa: str,
    T: int,
    acc: Any,
    weights: Any,
    at: int,
    index: int,
    blocks: int,
    values: Any,
    scales: Any,
    sums: Any,
    offsets: Any,
    rows: Any,
) -> Any:
    """acc plus the product of block `index` of `blocks`, whose weights start at byte `at`."""
    layout = R16[format]
    machine = PyMachine(
        weights, at, layout.elements, values, scales, sums, offsets, rows, index, blocks, layout.sums
    )  # fmt: skip
    return tuple(layout.micro(machine, list(acc)))


def tile(
    format: Any,
    isa: Any,
    T: Any,
    weights: Any,
    at: Any,
    blocks: Any,
    values: Any,
    scales: Any,
    sums: Any,
    offsets: Any,
    rows: Any,
) -> Any:
    """The products of sixteen output rows with T rows of activations."""
    acc = start(T)
    size = block_bytes(format)
    for index in range(blocks):
        acc = block(format, isa, T, acc, weights, at + index * size, index, blocks, values, scales, sums, offsets, rows)
    return acc


@intrinsic(prefer_literal=True)
def _block_bytes(typingctx: Any, format: Any) -> Any:
    size = R16[format.literal_value].block_bytes
    return types.int64(format), lambda context, builder, signature, args: I64(size)


@intrinsic(prefer_literal=True)
def _start(typingctx: Any, T: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(signature.return_type), None)

    return types.UniTuple(f32x16, T.literal_value)(T), codegen


def _address(context: Any, builder: Any, kind: Any, array: Any, element: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.ptrtoint(builder.gep(data, [element]), I64)


def _block_addresses(context: Any, builder: Any, signature: Any, args: Any, layout: Any, T: int) -> Block:
    weights, at, index, blocks = args[4:8]
    kinds = signature.args[8:12]

    def of_tokens(array: int, per_block: int) -> list[Any]:
        addresses = []
        for token in range(T):
            position = builder.add(builder.mul(builder.extract_value(args[12], token), blocks), index)
            element = builder.mul(position, I64(per_block))
            addresses.append(_address(context, builder, kinds[array], args[8 + array], element))
        return addresses

    return Block(
        _address(context, builder, signature.args[4], weights, at),
        of_tokens(0, layout.elements),
        of_tokens(1, 1),
        of_tokens(2, layout.sums),
        of_tokens(3, 1),
    )


@intrinsic(prefer_literal=True)
def _block(
    typingctx: Any,
    format: Any,
    isa: Any,
    T: Any,
    acc: Any,
    weights: Any,
    at: Any,
    index: Any,
    blocks: Any,
    values: Any,
    scales: Any,
    sums: Any,
    offsets: Any,
    rows: Any,
) -> Any:
    layout, tokens, instructions = R16[format.literal_value], T.literal_value, isa.literal_value
    vectors = types.UniTuple(f32x16, tokens)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses = _block_addresses(context, builder, signature, args, layout, tokens)
        machine = LLVMMachine(builder, instructions, addresses)
        machine.prefetch(layout.ahead, layout.block_bytes)
        start = [Value(builder, builder.extract_value(args[3], token)) for token in range(tokens)]
        result = ir.Constant(context.get_value_type(signature.return_type), ir.Undefined)
        for token, value in enumerate(layout.micro(machine, start)):
            result = builder.insert_value(result, value.v, token)
        return result

    place = (types.intp, types.intp, types.intp)
    arrays = (values, scales, sums, offsets)
    signature = vectors(format, isa, T, vectors, weights, *place, *arrays, types.UniTuple(types.intp, tokens))
    return signature, codegen


# Inside kernels these are intrinsics themselves, not overloads: an overload is a compilation more for each format.
block_bytes = _block_bytes_in_python if config.DISABLE_JIT else _block_bytes
start = _start_in_python if config.DISABLE_JIT else _start
block = _block_in_python if config.DISABLE_JIT else _block
overload(tile, prefer_literal=True, strict=False)(
    lambda format, isa, T, weights, at, blocks, values, scales, sums, offsets, rows: tile
)
