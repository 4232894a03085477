"""What every op checks before a kernel sees an array: kernels trust shapes, page ids, planes and positions.

Each check raises UsageError: the caller, not the user's model, is at fault.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dotllm.errors import UsageError
from dotllm.ops.protocol import PAGE, Rows

__all__ = ["check_kv_rows", "check_recurrent_rows", "floats", "ids", "integers", "require"]

_PAGE_FAULTS = (
    "rows and sequences differ in length from the batch",
    "a row names a sequence that has no pages",
    "a position is negative or lies beyond the sequence's pages",
    "a page does not exist",
    "rows of a sequence are not in order of position",
)
_PLANE_FAULTS = (
    "read, write and starts do not describe the same sequences",
    "the rows of the sequences do not cover the batch, each with at least one row",
    "a plane does not exist",
)


def require(condition: bool, message: str, *values: Any) -> None:
    """Raise UsageError with the message, formatted with the values, unless the condition holds."""
    if not condition:
        raise UsageError(message.format(*values))


def floats(name: str, array: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A contiguous float32 array of that shape, as a flat view."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise UsageError(f"{name} must be contiguous float32 of shape {shape}, not {array.dtype} of {array.shape}")
    flat: NDArray[np.float32] = array.reshape(-1)
    return flat


def integers(name: str, array: Any, ndim: int = 1) -> NDArray[np.int32]:
    """A contiguous int32 array of that many dimensions."""
    if array.dtype != np.int32 or array.ndim != ndim or not array.flags.c_contiguous:
        raise UsageError(f"{name} must be contiguous int32 with {ndim} axes, not {array.dtype} of {array.shape}")
    checked: NDArray[np.int32] = array
    return checked


def ids(name: str, array: Any, limit: int, ndim: int = 1) -> NDArray[np.int32]:
    """An int32 array whose values lie in 0 .. limit - 1."""
    checked = integers(name, array, ndim)
    if checked.size and (checked.min() < 0 or checked.max() >= limit):
        raise UsageError(f"{name} must lie in 0 .. {limit - 1}, not {checked.min()} .. {checked.max()}")
    return checked


@njit(cache=True)
def _page_fault(sequence: Any, positions: Any, pages: Any, rows: int, window: int, page_count: int) -> int:
    # every page that a row reads is looked at once: rows of a sequence are neighbours and ascend
    if positions.size != rows or sequence.size != rows:
        return 1
    before, last, unchecked = -1, 0, 0
    for row in range(rows):
        s, position = int(sequence[row]), int(positions[row])
        if s < 0 or s >= pages.shape[0]:
            return 2
        if position < 0 or position // PAGE >= pages.shape[1]:
            return 3
        if s != before:
            unchecked = 0
        elif position <= last:
            return 5
        start = max(0, position - window + 1) if window > 0 else 0
        for tile in range(max(unchecked, start // PAGE), position // PAGE + 1):
            if pages[s, tile] < 0 or pages[s, tile] >= page_count:
                return 4
        before, last, unchecked = s, position, position // PAGE + 1
    return 0


@njit(cache=True)
def _plane_fault(starts: Any, read: Any, write: Any, rows: int, planes: int) -> int:
    if write.size != read.size or starts.size != read.size + 1:
        return 1
    if starts[0] != 0 or starts[starts.size - 1] != rows:
        return 2
    for s in range(read.size):
        if starts[s + 1] <= starts[s]:
            return 2
        if read[s] < 0 or read[s] >= planes or write[s] < 0 or write[s] >= planes:
            return 3
    return 0


def check_kv_rows(rows: Rows, count: int, window: int, page_count: int) -> None:
    """Every page that `count` rows touch exists; window 1 means a row's own page only, 0 all before it."""
    integers("rows.pages", rows.pages, 2)
    sequence, positions = integers("rows.sequence", rows.sequence), integers("rows.positions", rows.positions)
    fault = _page_fault(sequence, positions, rows.pages, count, window, page_count)
    if fault:
        raise UsageError(f"a batch of {count} rows over {page_count} pages: {_PAGE_FAULTS[fault - 1]}")


def check_recurrent_rows(rows: Rows, count: int, planes: int) -> None:
    """The sequences cover `count` rows, and their planes exist."""
    starts, read, write = (integers("rows.starts, read, write", a) for a in (rows.starts, rows.read, rows.write))
    fault = _plane_fault(starts, read, write, count, planes)
    if fault:
        raise UsageError(f"a batch of {count} rows over {planes} planes: {_PLANE_FAULTS[fault - 1]}")
