"""Vectors and float32 primitives: compiled and Python forms agree to the bit; the Python form guards its arrays."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from dotllm.kernels_cpu import lanes
from dotllm.kernels_cpu.lanes import (
    absolute,
    bfloat_to_float,
    bits_to_float,
    div16,
    exponent_of,
    float_to_bfloat,
    float_to_bits,
    float_to_half,
    fma,
    fma16,
    half_to_float,
    lane16,
    like,
    load16,
    load16_bfloat,
    load16_half,
    max16,
    min16,
    peak16,
    pow2,
    rint,
    splat16,
    sqrt16,
    store16,
    store16_half,
    store16_int8,
    sum16,
    where_less,
    zero16,
)


def _everything(a: Any, halves: Any, small: Any, out: Any) -> None:
    v, w, b = load16(a, 3), load16_half(halves, 1), load16_bfloat(halves, 2)
    store16(out, 0, fma16(v, w, splat16(a[0])) * v - zero16() + like(v, 0.1))
    store16(out, 16, max16(v, min16(w, div16(v, w))))
    store16(out, 32, where_less(v, w, sqrt16(absolute(v)), b))
    store16(out, 48, pow2(rint(v)) + exponent_of(absolute(w)))
    store16_half(halves, 20, v)
    store16_int8(small, 0, rint(v * like(v, 20.0)))
    out[64], out[65], out[66] = sum16(v), peak16(v), lane16(v, 5)
    out[67], out[68] = fma(a[0], a[1], a[2]), half_to_float(halves[3])
    out[69], out[70] = bits_to_float(float_to_bits(a[5])), bfloat_to_float(float_to_bfloat(a[4]))
    halves[40] = float_to_half(a[7])


def test_compiled_and_python_forms_agree() -> None:
    rng = np.random.default_rng(0)
    compiled = njit(_everything)
    for _ in range(20):
        a, halves = rng.standard_normal(24).astype(np.float32), rng.standard_normal(48).astype(np.float16)
        results = []
        for form in (compiled, _everything):
            arrays = [a.copy(), halves.view(np.uint16).copy(), np.zeros(16, np.int8), np.zeros(80, np.float32)]
            form(*arrays)
            results.append(arrays)
        for x, y in zip(*results, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def test_sum_is_a_tree() -> None:
    v = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    a = v[:8] + v[8:]
    b = a[:4] + a[4:]
    c = b[:2] + b[2:]
    assert sum16(v) == c[0] + c[1]


@pytest.mark.parametrize("index", [-1, 9, 25])
def test_python_form_refuses_what_lies_outside(index: int) -> None:
    floats, halves, small = np.zeros(24, np.float32), np.zeros(24, np.uint16), np.zeros(24, np.int8)
    for call in (
        lambda: load16(floats, index),
        lambda: load16_half(halves, index),
        lambda: load16_bfloat(halves, index),
        lambda: store16(floats, index, zero16()),
        lambda: store16_half(halves, index, zero16()),
        lambda: store16_int8(small, index, zero16()),
        lambda: lane16(zero16(), index if index < 0 else 16),
    ):
        with pytest.raises(IndexError):
            call()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _nearest(exact: Fraction) -> np.float32:
    """The float32 nearest to an exact number, ties to even: the best of three candidates around it."""
    guess = np.float32(float(exact))
    if not np.isfinite(guess):
        return guess
    with np.errstate(over="ignore"):
        around = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    candidates = [c for c in around if np.isfinite(c)]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.int32)) & 1))


@given(finite, finite, finite)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    x, y, z = np.float32(a), np.float32(b), np.float32(c)
    if abs(exact) >= Fraction(float(np.finfo(np.float32).max)):
        return
    assert fma(x, y, z) == _nearest(exact)
    assert fma(np.full(3, x), y, z)[1] == fma(x, y, z)


def test_fma_where_two_roundings_would_differ() -> None:
    scale = np.float32(2) ** np.arange(-20, 20, dtype=np.float32)
    a, b = scale * np.float32(257), np.full(40, 65281, np.float32)  # a product halfway between two float32
    for sign in (-1, 1):
        c = scale * np.float32(sign * 2.0**-40)  # decides, but is lost in a float64 sum
        out = np.empty_like(a)
        _fma_all(a, b, c, out)
        expected = scale * np.float32(16777216 if sign < 0 else 16777218)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(fma(a, b, c), expected)
        np.testing.assert_array_equal([fma(*values) for values in zip(a, b, c, strict=True)], expected)


@njit
def _fma_all(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(a.size):
        out[i] = fma(a[i], b[i], c[i])


@njit
def _no_contraction(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(a.size):
        out[i] = a[i] * b[i] + c[i]


def test_products_and_sums_are_not_fused() -> None:
    a, b, c = np.random.default_rng(0).standard_normal((3, 4096)).astype(np.float32)
    out = np.empty_like(a)
    _no_contraction(a, b, c, out)
    np.testing.assert_array_equal(out, a * b + c)


def test_names() -> None:
    assert all(hasattr(lanes, name) for name in lanes.__all__)
