"""Checked access to metadata: the right kind of number, in range, or an error that names the key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dotllm.errors import ModelFileError
from dotllm.gguf.reader import GGUFFile

__all__ = ["Keys"]

LARGEST = 2**31 - 1


class Keys:
    """The metadata of a file below the prefix of its architecture. All methods raise ModelFileError."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix

    def fail(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: key {self._prefix}.{key} {problem}")

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self._file.metadata.get(f"{self._prefix}.{key}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        """A whole number of any width; required if there is no default."""
        value = self._present(key, default)
        if type(value) is not int:
            raise self.fail(key, f"must be a whole number, not {value!r:.60}")
        return self._in_range(key, value, least, most)

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A positive finite number; 0 too with `zero`."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"must be a number, not {value!r:.60}")
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise self.fail(key, f"is {value}; a positive finite number is needed")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, not {value!r:.60}")
        return value

    def integers(self, key: str, least_count: int, *, least: int = 0, most: int = LARGEST) -> tuple[int, ...] | None:
        """An array of whole numbers or booleans with at least that many elements, or None if the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iub":
            raise self.fail(key, f"must be an array of whole numbers, not {value!r:.60}")
        if len(value) < least_count:
            raise self.fail(key, f"has {len(value)} elements; {least_count} are needed")
        return tuple(self._in_range(key, int(v), least, most) for v in value)

    def per_block(self, key: str, blocks: int, default: int | None = None, *, most: int = LARGEST) -> tuple[int, ...]:
        """One number for each block, from a single number or an array; zeros are allowed.

        An array that ends before a NextN block, because it was written for the main layers, repeats its last number.
        """
        if isinstance(self.get(key), np.ndarray):
            values = self.integers(key, 1, most=most) or ()
            if len(values) < blocks - 1:
                raise self.fail(key, f"has {len(values)} elements for {blocks} blocks")
            return (values + values[-1:])[:blocks]
        return (self.integer(key, default, least=0, most=most),) * blocks

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing; convert the model again")
        return value

    def _in_range(self, key: str, value: int, least: int, most: int) -> int:
        if not least <= value <= most:
            raise self.fail(key, f"is {value}; it must lie in {least} .. {most}")
        return value
