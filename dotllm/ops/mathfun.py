"""exp, log, tanh and their kin in float32, from our own polynomials: the same bits on every machine.

libm and vector maths libraries differ between machines and even between positions in an array. Each function here is
one text in the primitives of `float32`: NumPy runs it on scalars and arrays as it stands, `kernels_cpu.mathfun`
compiles it for a float32 and for a vector of sixteen. Errors are below 2 units in the last place.
"""

from __future__ import annotations

from typing import Any

from dotllm.ops.float32 import (
    absolute,
    div,
    exponent_of,
    fma,
    like,
    maximum,
    minimum,
    pow2,
    rint,
    round_half,
    where_less,
)

__all__ = ["exp", "gelu_half", "gelu_tanh", "log", "log1p_of_exp", "sigmoid", "silu", "softplus", "tanh"]


def exp(x: Any) -> Any:
    """e ** x, with denormal results; 0 below -104, infinity above 88.73."""
    clipped = minimum(like(x, 89.0), maximum(like(x, -104.0), x))  # NaN passes: it is the second operand of both
    n = rint(clipped * like(x, 1.44269502162933349609375))
    r = fma(n, like(x, -0.693145751953125), clipped)  # ln 2 in two parts; n times the first is exact
    r = fma(n, like(x, -1.42860676533018e-06), r)
    p = fma(r, like(x, 0.0013950446154922247), like(x, 0.008368886075913906))
    p = fma(p, r, like(x, 0.04166620597243309))
    p = fma(p, r, like(x, 0.1666651964187622))
    p = fma(p, r, like(x, 0.5))
    p = fma(p * r, r, r) + like(x, 1.0)
    half = rint(n * like(x, 0.5))  # 2 ** n itself may lie outside the normal numbers, its two halves do not
    return p * pow2(half) * pow2(n - half)


def log(x: Any) -> Any:
    """Natural logarithm of a positive, normal, finite x; other inputs give unspecified values."""
    e = exponent_of(x)
    half = rint(e * like(x, 0.5))
    f = x * pow2(like(x, 0.0) - half) * pow2(half - e) - like(x, 1.0)
    p = fma(f, like(x, -0.07878591865301132), like(x, 0.12897630035877228))
    p = fma(p, f, like(x, -0.13128775358200073))
    p = fma(p, f, like(x, 0.1417907327413559))
    p = fma(p, f, like(x, -0.16624416410923004))
    p = fma(p, f, like(x, 0.20002369582653046))
    p = fma(p, f, like(x, -0.25000813603401184))
    p = fma(p, f, like(x, 0.33333316445350647))
    square = f * f
    low = fma(p * f, square, e * like(x, 1.42860676533018e-06))
    low = fma(square, like(x, -0.5), low)
    return fma(e, like(x, 0.693145751953125), f + low)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e ** -x), accurate on both sides."""
    zero, one = like(x, 0.0), like(x, 1.0)
    e = exp(zero - absolute(x))
    return div(where_less(x, zero, e, one), one + e)


def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    zero, one = like(x, 0.0), like(x, 1.0)
    e = exp(zero - absolute(x))
    return div(x * where_less(x, zero, e, one), one + e)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    zero, one = like(x, 0.0), like(x, 1.0)
    size = minimum(like(x, 20.0), absolute(x))
    z = size * size
    p = fma(z, like(x, -0.005683864466845989), like(x, 0.020622802898287773))
    p = fma(p, z, like(x, -0.05373568832874298))
    p = fma(p, z, like(x, 0.1333140879869461))
    p = fma(p, z, like(x, -0.3333328068256378))
    near = fma(p * z, x, x)
    far = one - div(like(x, 2.0), exp(size + size) + one)
    return where_less(size, like(x, 0.625), near, where_less(x, zero, zero - far, far))


def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(y)) with y = sqrt(2 / pi) x (1 + 0.044715 x^2), in its other form x * sigmoid(2 y)."""
    zero, one = like(x, 0.0), like(x, 1.0)
    inner = fma(x * x, like(x, 0.044715), one)
    e = exp(zero - absolute(like(x, 1.5957691216057308) * x * inner))
    return div(x * where_less(x, zero, e, one), one + e)


def gelu_half(x: Any) -> Any:
    """gelu_tanh as ggml's CPU code computes it: input and result rounded to float16; 0 below -10, x above 10."""
    near = where_less(like(x, -10.0), x, round_half(gelu_tanh(round_half(x))), like(x, 0.0))
    return where_less(x, like(x, 10.0), near, x)


def log1p_of_exp(x: Any) -> Any:
    """log(1 + e ** x) for x <= 20 or so: the part of 1 + e that rounding lost is put back."""
    one = like(x, 1.0)
    e = exp(x)
    u = one + e
    return log(u) + div(e - (u - one), u)


def softplus(x: Any) -> Any:
    """log(1 + e ** x); x itself above 20."""
    limit = like(x, 20.0)
    return where_less(limit, x, x, log1p_of_exp(minimum(limit, x)))
