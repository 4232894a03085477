"""Running a recorded program: threads draw tickets, each ticket is one part of one kernel call.

    commands       | kernel A, 2 parts | kernel B, 2 parts | kernel C, 1 part | ..      B is in A's group, C is not
    tickets        |    0    |    1    |    2    |    3    |        4         | ..
    needed         |         0         |         0         |        4         | ..      tickets done before it begins

A thread takes the next ticket with one atomic addition and waits, spinning, until what the command needs is done. No
thread is ever waited for that has not taken a ticket: one that starts late, or never, costs its help and nothing more.

Kernels are called by address through a trampoline, one per list of argument types, which reads the arguments from a
table of 64-bit words: an array is its address and its lengths, a number one word.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "DONE",
    "FAILED",
    "NEXT",
    "YIELD",
    "address_of",
    "execute",
    "execute_alone",
    "name_closure",
    "trampoline",
    "types_of",
    "yield_address",
]

I64 = ir.IntType(64)

NEXT, DONE, FAILED, YIELD = 0, 16, 32, 33
"""Words of the state of a run: tickets taken, tickets done (in cache lines of their own), 1 + the command that failed,
the address of the system's yield."""

_SPINS = 400  # pauses, about twenty microseconds, before a waiting thread offers its core to others

_SCALARS = {"i": types.int64, "d": types.float64, "b": types.boolean}
_ELEMENTS = {
    "f": types.float32,
    "B": types.uint8,
    "b": types.int8,
    "H": types.uint16,
    "i": types.int32,
}


def types_of(signature: str) -> tuple[Any, ...]:
    """The Numba types that a signature names: "i" int, "d" float, "b" bool, "f1" float32 array, "(..)" a tuple."""
    return _parse(signature.split(), [])


def _parse(words: list[str], out: list[Any]) -> tuple[Any, ...]:
    while words:
        word = words.pop(0)
        if word == ")":
            break
        if word == "(":
            out.append(types.BaseTuple.from_types(_parse(words, [])))
        elif len(word) == 1:
            out.append(_SCALARS[word])
        else:
            out.append(types.Array(_ELEMENTS[word[0]], int(word[1]), "C"))
    return tuple(out)


def address_of(kernel: Any, kinds: tuple[Any, ...]) -> int:
    """The address of a kernel compiled for arguments of these types; compiles it, or loads it, if need be."""
    if kinds not in kernel.overloads:
        kernel.compile(kinds)
    compiled = kernel.overloads[kinds]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def name_closure(function: Any, name: str) -> None:
    """Give a closure a name of its own, before Numba sees it.

    Numba names a compiled function by its qualified name, argument types and a number that counts functions in one
    process; in another process the same three may stand for another closure of the same factory, and where both come
    from the cache one would run in the place of the other.
    """
    function.__name__ = name
    function.__qualname__ = f"{function.__module__}.{name}"


@cache
def yield_address() -> int:
    """The system's function, without arguments, by which a thread gives up its turn."""
    if sys.platform == "win32":
        function: Any = ctypes.WinDLL("kernel32").SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _word(builder: Any, table: Any, index: int) -> Any:
    return builder.load(builder.gep(table, [I64(index)]))


def _read(context: Any, builder: Any, kind: Any, table: Any, at: int) -> tuple[Any, int]:
    """The argument of type `kind` whose words begin at `at`, and where the next begins."""
    if isinstance(kind, types.BaseTuple):
        items = []
        for item in kind:
            value, at = _read(context, builder, item, table, at)
            items.append(value)
        return context.make_tuple(builder, kind, items), at
    if isinstance(kind, types.Array):
        return _read_array(context, builder, kind, table, at), at + 1 + kind.ndim
    word = _word(builder, table, at)
    if kind == types.float64:
        return builder.bitcast(word, ir.DoubleType()), at + 1
    if kind == types.boolean:
        return builder.trunc(word, ir.IntType(1)), at + 1
    return word, at + 1


def _read_array(context: Any, builder: Any, kind: Any, table: Any, at: int) -> Any:
    array = context.make_array(kind)(context, builder)
    element = context.get_data_type(kind.dtype)
    size = context.get_abi_sizeof(element)
    shape = [_word(builder, table, at + 1 + axis) for axis in range(kind.ndim)]
    step: Any = I64(size)
    strides: list[Any] = []
    for length in reversed(shape):
        strides.insert(0, step)
        step = builder.mul(step, length)
    array.data = builder.inttoptr(_word(builder, table, at), ir.PointerType(element))
    array.itemsize = I64(size)
    array.nitems = builder.udiv(step, I64(size))
    array.shape, array.strides = cgutils.pack_array(builder, shape), cgutils.pack_array(builder, strides)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()


@intrinsic(prefer_literal=True)
def _invoke(typingctx: Any, signature: Any, kernel: Any, arguments: Any, part: Any, parts: Any) -> Any:
    kinds = (*types_of(signature.literal_value), types.int64, types.int64)

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, address, words, *share = args
        table = builder.inttoptr(words, ir.PointerType(I64))
        values, at = [], 0
        for kind in kinds[:-2]:
            value, at = _read(context, builder, kind, table, at)
            values.append(value)
        function = context.call_conv.get_function_type(types.none, kinds)
        pointer = builder.inttoptr(address, ir.PointerType(function))
        status, _ = context.call_conv.call_function(builder, pointer, types.none, kinds, [*values, *share])
        return builder.zext(status.is_error, I64)

    return types.int64(signature, *(types.int64,) * 4), codegen


@cache
def trampoline(signature: str) -> int:
    """The address of a function (kernel, arguments, part, parts) -> 0, or 1 where the kernel raised."""

    def run(kernel: int, arguments: int, part: int, parts: int) -> Any:
        return _invoke(signature, kernel, arguments, part, parts)

    name_closure(run, "trampoline_" + "".join(c if c.isalnum() else f"{ord(c):x}" for c in signature))
    kinds = (types.int64,) * 4
    return address_of(njit([types.int64(*kinds)], cache=True)(run), kinds)


@intrinsic
def _call_trampoline(typingctx: Any, address: Any, kernel: Any, arguments: Any, part: Any, parts: Any) -> Any:
    kinds = (types.int64,) * 4

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = context.call_conv.get_function_type(types.int64, kinds)
        pointer = builder.inttoptr(args[0], ir.PointerType(function))
        _, result = context.call_conv.call_function(builder, pointer, types.int64, kinds, args[1:])
        return result

    return types.int64(types.int64, *kinds), codegen


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


@intrinsic
def _atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", place, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature.args[0], args[0], args[1]), "acquire", 8)

    return types.int64(array, types.int64), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tells the core that this is a spinning loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nothing: Any = ir.VoidType()
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            kind = ir.FunctionType(nothing, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            kind = ir.FunctionType(nothing, [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.IntType(32)(1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        builder.call(builder.inttoptr(args[0], ir.PointerType(function)), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(cache=True)
def _wait(state: Any, needed: int) -> None:
    spins = 0
    while _atomic_load(state, DONE) < needed:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _yield(state[YIELD])


@njit(cache=True)
def _work(commands: Any, tickets: Any, needed: Any, state: Any) -> None:
    total, at = tickets[tickets.size - 1], 0
    ticket = _atomic_add(state, NEXT, 1)
    while ticket < total:
        while ticket >= tickets[at + 1]:
            at += 1
        _wait(state, needed[at])
        failed = _call_trampoline(
            commands[at, 0], commands[at, 1], commands[at, 2], ticket - tickets[at], tickets[at + 1] - tickets[at]
        )
        if failed:
            state[FAILED] = at + 1
        _atomic_add(state, DONE, 1)
        ticket = _atomic_add(state, NEXT, 1)


@njit(cache=True, parallel=True, nogil=True)
def execute(commands: Any, tickets: Any, needed: Any, state: Any, threads: int) -> None:
    """Run all commands (C, 3: trampoline, kernel, arguments) on `threads` threads.

    Command c has the tickets tickets[c] .. tickets[c + 1] and begins when needed[c] tickets are done; `state` is
    zeroed but for YIELD.
    """
    for _ in prange(threads):
        _work(commands, tickets, needed, state)


@njit(cache=True, nogil=True)
def execute_alone(commands: Any, tickets: Any, needed: Any, state: Any) -> None:
    """The same without other threads: nothing is started."""
    _work(commands, tickets, needed, state)
