"""What ops hand out and take back without looking inside: tables of rows, and rows ready for products."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.errors import UsageError
from dotllm.ops.rounding import Rounded

__all__ = ["CpuPrepared", "CpuTable"]


@dataclass(frozen=True, slots=True)
class CpuTable:
    """A token embedding as it lies in the file: its rows are dequantised when they are looked up."""

    shape: tuple[int, ...]
    raw: NDArray[np.uint8]  # (V * bytes of a row,)
    kernel: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class CpuPrepared:
    """Rows (M, K) in every rounding that was asked for, by kind; as floats again where a kernel wants them so."""

    shape: tuple[int, int]
    rounded: dict[str, Rounded]
    floats: dict[str, tuple[NDArray[Any], ...]] = field(default_factory=dict)

    def of(self, kind: str) -> Rounded:
        """The rows rounded as `kind`; raises UsageError if the rows were not prepared for such weights."""
        try:
            return self.rounded[kind]
        except KeyError:
            raise UsageError(f"these rows were prepared as {', '.join(self.rounded)}, not as {kind}") from None
