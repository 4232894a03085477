"""The kernel behind `matmul` for interleaved weights: one per format, for matrices and stacks of experts alike.

Work is a list of segments, each some input rows that meet one expert's matrix (a plain product has expert 0 only), and
of groups of sixteen output rows; threads share out (segment, group) pairs, never a sum:

    segment s: pairs starts[s] .. starts[s + 1]; pair p reads row sources[p] of x and writes row targets[p] of out

Numba optimises a function again in every function that it is linked into, and a parallel one has six such layers. So
one small parallel kernel, `launch`, calls the compiled product of whatever format by its address.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from dotllm.kernels_cpu.lanes import lane16, load16, store16
from dotllm.kernels_cpu.micro import block_bytes, tile

__all__ = ["ARGUMENTS", "address_of", "compile_product", "interleaved_product", "launch"]

_I32 = types.Array(types.int32, 1, "C")
_F32 = types.Array(types.float32, 1, "C")

ARGUMENTS = (
    types.Array(types.uint8, 1, "C"),  # weights: experts x groups x blocks x block_bytes
    types.int64,  # blocks in a row
    types.Tuple((types.Array(types.int8, 1, "C"), _F32, _I32, _F32)),  # x: values, scales, sums, offsets
    types.UniTuple(_I32, 4),  # work: starts, experts, sources, targets
    _F32,  # out: rows x width
    types.int64,  # width
    _F32,  # bias (width,), or empty
    types.boolean,  # add to out
    types.int64,  # items first .. last; item = segment * groups + group
    types.int64,
)


@njit(cache=True)
def _finish(v: Any, out: Any, at: int, first: int, width: int, bias: Any, add: bool) -> None:
    """out[at + first ..] = v, plus bias, plus what is there with `add`; only `width` columns exist."""
    if first + 16 <= width:
        if bias.size > 0:
            v = v + load16(bias, first)
        if add:
            v = load16(out, at + first) + v
        store16(out, at + first, v)
        return
    for i in range(width - first):
        y = lane16(v, i)
        if bias.size > 0:
            y = y + bias[first + i]
        out[at + first + i] = out[at + first + i] + y if add else y


def compile_product(function: Any, name: str) -> Any:
    """A product as a cached kernel, under a name of its own.

    Numba names a compiled function by its qualified name, argument types and a number that counts functions in one
    process; in another process the same three may stand for another closure of the same factory, and where both come
    from the cache one would run in the place of the other.
    """
    function.__name__ = f"product_{name}"
    function.__qualname__ = f"{function.__module__}.{function.__name__}"
    return njit([types.void(*ARGUMENTS)], cache=True)(function)


@cache
def interleaved_product(format: str, isa: str) -> Any:
    """The product of R16 weights of `format`, items first .. last; arguments as above.

    A closure over two strings only, so that Numba can keep it on disk.
    """

    def product(
        weights: Any,
        blocks: int,
        x: Any,
        work: Any,
        out: Any,
        width: int,
        bias: Any,
        add: bool,
        first: int,
        last: int,
    ) -> None:
        values, scales, sums, offsets = x
        starts, experts, sources, targets = work
        groups = (width + 15) // 16
        for item in range(first, last):
            segment, group = item // groups, item % groups
            at = (experts[segment] * groups + group) * blocks * block_bytes(format)
            pair, stop = starts[segment], starts[segment + 1]
            while pair + 4 <= stop:
                four = (sources[pair], sources[pair + 1], sources[pair + 2], sources[pair + 3])
                y4 = tile(format, isa, 4, weights, at, blocks, values, scales, sums, offsets, four)
                for t in range(4):
                    _finish(y4[t], out, targets[pair + t] * width, 16 * group, width, bias, add)
                pair += 4
            if pair + 2 <= stop:
                two = (sources[pair], sources[pair + 1])
                y2 = tile(format, isa, 2, weights, at, blocks, values, scales, sums, offsets, two)
                for t in range(2):
                    _finish(y2[t], out, targets[pair + t] * width, 16 * group, width, bias, add)
                pair += 2
            if pair < stop:
                one = (sources[pair],)
                y1 = tile(format, isa, 1, weights, at, blocks, values, scales, sums, offsets, one)
                _finish(y1[0], out, targets[pair] * width, 16 * group, width, bias, add)

    return compile_product(product, f"{format}_{isa}")


def address_of(kernel: Any) -> Any:
    """What `launch` calls: the address of a kernel's compiled code, or the kernel itself where nothing is compiled."""
    if config.DISABLE_JIT:
        return kernel
    (compiled,) = kernel.overloads.values()
    return np.int64(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def _call_in_python(kernel: Any, *arguments: Any) -> None:
    kernel(*arguments)


@intrinsic
def _call(
    typingctx: Any,
    address: Any,
    weights: Any,
    blocks: Any,
    x: Any,
    work: Any,
    out: Any,
    width: Any,
    bias: Any,
    add: Any,
    first: Any,
    last: Any,
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = context.call_conv.get_function_type(types.void, ARGUMENTS)
        pointer = builder.inttoptr(args[0], ir.PointerType(function))
        status, _ = context.call_conv.call_function(builder, pointer, types.void, ARGUMENTS, args[1:])
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, *ARGUMENTS), codegen


_call_kernel = _call_in_python if config.DISABLE_JIT else _call


@njit(cache=True, parallel=True)
def launch(
    kernel: Any,
    weights: Any,
    blocks: int,
    x: Any,
    work: Any,
    out: Any,
    width: int,
    bias: Any,
    add: bool,
    threads: int,
) -> None:
    """Run the kernel at an address on `threads` threads, each with its share of the items."""
    items = (work[0].size - 1) * ((width + 15) // 16)
    for thread in prange(threads):
        first = np.int64(items * np.int64(thread) // threads)
        last = np.int64(items * (np.int64(thread) + 1) // threads)
        _call_kernel(kernel, weights, blocks, x, work, out, width, bias, add, first, last)
