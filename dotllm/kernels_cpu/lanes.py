"""Sixteen float32 at a time: the vector API that every CPU kernel is written in.

A vector is a first-class value of type `f32x16` in compiled code and a float32 array of 16 under `NUMBA_DISABLE_JIT=1`.
Every CPU computes with sixteen logical lanes (AVX2 as two halves), so results do not depend on the register width.
Each primitive is a plain Python function (its definition, checked against the bounds of its array) and an overload to
LLVM instructions (unchecked). Nothing here is `fastmath`: products and sums fuse only where `fma` is written.

    load16(a, i)      a[i .. i+16) of a one-dimensional contiguous float32 array        v + w, v - w, v * w
    store16(a, i, v)  and back                                                           fma16(a, b, c) = a * b + c
    load16_half ...   the same from float16 or bfloat16 bits in uint16                   div16 max16 min16 sqrt16
    sum16(v)          horizontal, by halves: 8+8, 4+4, 2+2, 1+1                          peak16 (largest), same tree
    lane16(v, i)      one lane
"""

from __future__ import annotations

from dotllm.kernels_cpu.lanes_llvm import F32x16, f32x16
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
from dotllm.ops.float32 import (
    absolute,
    bfloat_to_float,
    bits_to_float,
    div,
    exponent_of,
    float_to_bfloat,
    float_to_bits,
    float_to_half,
    fma,
    half_to_float,
    like,
    maximum,
    minimum,
    pow2,
    rint,
    sqrt,
    where_less,
)

__all__ = [
    "WIDTH",
    "F32x16",
    "absolute",
    "bfloat_to_float",
    "bits_to_float",
    "div",
    "div16",
    "exponent_of",
    "f32x16",
    "float_to_bfloat",
    "float_to_bits",
    "float_to_half",
    "fma",
    "fma16",
    "half_to_float",
    "lane16",
    "like",
    "load16",
    "load16_bfloat",
    "load16_half",
    "max16",
    "maximum",
    "min16",
    "minimum",
    "peak16",
    "pow2",
    "rint",
    "splat16",
    "sqrt",
    "sqrt16",
    "store16",
    "store16_half",
    "store16_int8",
    "sum16",
    "where_less",
    "zero16",
]

# The vector names of primitives that also work on a float32.
fma16, div16, max16, min16, sqrt16 = fma, div, maximum, minimum, sqrt
