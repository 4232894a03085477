"""The functions of `ops.mathfun` inside kernels, for a float32 and for a vector alike, from the same text.

Importing this module teaches Numba to compile that text; it holds no formula of its own.
"""

from __future__ import annotations

from numba.extending import register_jitable

import dotllm.kernels_cpu.lanes_llvm  # noqa: F401 - the primitives that the functions are written in
from dotllm.ops.mathfun import exp, gelu_half, gelu_tanh, log, log1p_of_exp, sigmoid, silu, softplus, tanh

__all__ = ["exp", "gelu_half", "gelu_tanh", "log", "sigmoid", "silu", "softplus", "tanh"]

for _function in (exp, gelu_half, gelu_tanh, log, log1p_of_exp, sigmoid, silu, softplus, tanh):
    register_jitable(_function)
