"""Tensor types of GGUF files: ids, block sizes, and how activations are rounded in products with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Literal

__all__ = ["FORMATS", "ActivationRounding", "BlockFormat", "GGMLType"]

ActivationRounding = Literal["F32", "F16", "BF16", "Q8_0", "Q8_1", "Q8_K"]


class GGMLType(IntEnum):
    """Every tensor type id that was ever written to GGUF files; `FORMATS` holds the ones that can be read.

    The others are here so that an error can name them.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q4_2 = 4
    Q4_3 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    Q4_0_4_4 = 31
    Q4_0_4_8 = 32
    Q4_0_8_8 = 33
    TQ1_0 = 34
    TQ2_0 = 35
    IQ4_NL_4_4 = 36
    IQ4_NL_4_8 = 37
    IQ4_NL_8_8 = 38
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Storage of one type: `elements` values take `bytes` bytes; `activation` is the rounding of the other factor.

    In a matrix product the activations are first rounded to `activation`, as ggml does it on a CPU.
    """

    type: GGMLType
    elements: int
    bytes: int
    activation: ActivationRounding


def _formats() -> Mapping[GGMLType, BlockFormat]:
    rows: list[tuple[GGMLType, int, int, ActivationRounding]] = [
        (GGMLType.F32, 1, 4, "F32"),
        (GGMLType.F16, 1, 2, "F16"),
        (GGMLType.BF16, 1, 2, "BF16"),
        (GGMLType.F64, 1, 8, "F32"),
        (GGMLType.I8, 1, 1, "F32"),
        (GGMLType.I16, 1, 2, "F32"),
        (GGMLType.I32, 1, 4, "F32"),
        (GGMLType.I64, 1, 8, "F32"),
        (GGMLType.Q4_0, 32, 18, "Q8_0"),
        (GGMLType.Q4_1, 32, 20, "Q8_1"),
        (GGMLType.Q5_0, 32, 22, "Q8_0"),
        (GGMLType.Q5_1, 32, 24, "Q8_1"),
        (GGMLType.Q8_0, 32, 34, "Q8_0"),
        (GGMLType.Q2_K, 256, 84, "Q8_K"),
        (GGMLType.Q3_K, 256, 110, "Q8_K"),
        (GGMLType.Q4_K, 256, 144, "Q8_K"),
        (GGMLType.Q5_K, 256, 176, "Q8_K"),
        (GGMLType.Q6_K, 256, 210, "Q8_K"),
        (GGMLType.IQ4_NL, 32, 18, "Q8_0"),
        (GGMLType.IQ4_XS, 256, 136, "Q8_K"),
        (GGMLType.MXFP4, 32, 17, "Q8_0"),
        (GGMLType.Q1_0, 128, 18, "Q8_0"),
        (GGMLType.Q2_0, 64, 18, "Q8_0"),
        (GGMLType.TQ1_0, 256, 54, "Q8_K"),
        (GGMLType.TQ2_0, 256, 66, "Q8_K"),
    ]
    return MappingProxyType({row[0]: BlockFormat(*row) for row in rows})


FORMATS: Mapping[GGMLType, BlockFormat] = _formats()
"""The types that can be read, with their block formats."""
