"""The functions of `ops.mathfun` inside kernels: `silu(x)` of a float32, `silu16(v)` of a vector, from the same text.

Importing this module teaches Numba to compile that text; it holds no formula of its own.
"""

from __future__ import annotations

from numba.extending import register_jitable

import dotllm.kernels_cpu.lanes_llvm  # noqa: F401 - the primitives that the functions are written in
from dotllm.ops.mathfun import exp, gelu_half, log, log1p_of_exp, sigmoid, silu, softplus, tanh
from dotllm.ops.mathfun import gelu_tanh as gelu

__all__ = [
    "exp",
    "exp16",
    "gelu",
    "gelu16",
    "gelu_half",
    "log",
    "log16",
    "sigmoid",
    "sigmoid16",
    "silu",
    "silu16",
    "softplus",
    "softplus16",
    "tanh",
    "tanh16",
]

for _function in (exp, gelu, gelu_half, log, log1p_of_exp, sigmoid, silu, softplus, tanh):
    register_jitable(_function)

# The vector names: compiled for the type of their argument, as the plain names are.
exp16, gelu16, log16, sigmoid16, silu16, softplus16, tanh16 = exp, gelu, log, sigmoid, silu, softplus, tanh
