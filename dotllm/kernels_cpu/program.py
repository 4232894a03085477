"""Programs: kernel calls recorded once and run many times, without Python in between.

    recording   op, op, op -> groups of commands -> | kernel address | arguments | parts |     one table
    running     inputs copied to the addresses that were recorded; `execute` works through the table

A command is one call of a kernel, cut in parts that threads share; commands of one group are independent of each
other and run side by side. A group begins when the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import config, types

from dotllm.kernels_cpu.executor import (
    FAILED,
    YIELD,
    address_of,
    execute,
    execute_alone,
    trampoline,
    types_of,
    yield_address,
)

__all__ = ["LEAST_WORK", "Command", "Program", "parts_for"]


LEAST_WORK = 1 << 14
"""Multiply-adds (or the like) below which a second thread would come too late."""

_MUCH_WORK = 1 << 22  # here a thread that is held up should be able to leave something to the others


def parts_for(work: int, threads: int, least: int = LEAST_WORK) -> int:
    """In how many parts a command of so many multiply-adds (or the like) is cut."""
    if work < least or threads == 1:
        return 1
    return threads if work < _MUCH_WORK else 4 * threads


@dataclass(frozen=True, slots=True)
class Command:
    """A call of `kernel(*arguments, part, parts)` for every part; parts touch different memory.

    Arguments are contiguous arrays, bool, int, float, and tuples of arrays.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    parts: int


class Program:
    """Groups of commands, ready to run; keeps every array that they touch alive."""

    def __init__(self, groups: Sequence[Sequence[Command]]) -> None:
        self._commands = [command for group in groups for command in group]
        parts = [command.parts for command in self._commands]
        self._tickets = np.concatenate([[0], np.cumsum(parts)]).astype(np.int64)
        sizes = [len(group) for group in groups]
        begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)[:-1]
        self._needed = np.repeat(self._tickets[begins], sizes).astype(np.int64)
        if config.DISABLE_JIT or not self._commands:
            return
        words: list[int] = []
        table = [(*_addresses(command, words), at) for command, at in ((c, len(words)) for c in self._commands)]
        self._words = np.array(words, np.uint64)
        self._table = np.array(table, np.int64)
        self._table[:, 2] = self._words.ctypes.data + 8 * self._table[:, 2]
        self._state = np.zeros(64, np.int64)
        self._state[YIELD] = yield_address()

    def run(self, threads: int) -> None:
        """Run everything on `threads` threads; raises RuntimeError if a kernel failed."""
        if config.DISABLE_JIT:
            for command in self._commands:
                for part in range(command.parts):
                    command.kernel(*command.arguments, part, command.parts)
            return
        if not self._commands:
            return
        state = self._state
        state[:YIELD] = 0
        if threads == 1 or len(self._tickets) - 1 == self._tickets[-1]:
            execute_alone(self._table, self._tickets, self._needed, state)
        else:
            execute(self._table, self._tickets, self._needed, state, threads)
        if state[FAILED]:
            command = self._commands[state[FAILED] - 1]
            raise RuntimeError(f"the kernel {command.kernel.__name__} failed; this is a fault of dotllm")


def _addresses(command: Command, words: list[int]) -> tuple[int, int]:
    """The trampoline and the kernel of a command; its arguments are added to `words`."""
    signature = " ".join(_encode(argument, words) for argument in command.arguments)
    return trampoline(signature), _kernel_address(command.kernel, signature)


@cache
def _kernel_address(kernel: Any, signature: str) -> int:
    return address_of(kernel, (*types_of(signature), types.int64, types.int64))


def _encode(argument: Any, words: list[int]) -> str:
    """Add an argument's words, and name its type as `executor.types_of` reads it."""
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise ValueError(f"a kernel is given an array of {argument.shape} that is not contiguous")
        words += [argument.__array_interface__["data"][0], *argument.shape]
        return f"{argument.dtype.char}{argument.ndim}"
    if isinstance(argument, tuple):
        return " ".join(("(", *(_encode(item, words) for item in argument), ")"))
    if isinstance(argument, bool):
        words.append(int(argument))
        return "b"
    if isinstance(argument, float):
        words.append(int(np.float64(argument).view(np.uint64)))
        return "d"
    if not isinstance(argument, int):
        raise TypeError(f"a kernel cannot be given {argument!r}, a {type(argument).__name__}")
    words.append(argument & 0xFFFFFFFFFFFFFFFF)
    return "i"
