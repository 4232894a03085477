"""exp and its kin: one text, the same bits as NumPy arrays, scalars, compiled scalars and compiled vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from dotllm.kernels_cpu import mathfun
from dotllm.kernels_cpu.lanes import load16, store16

NAMES = ("exp", "sigmoid", "silu", "tanh", "gelu_tanh", "gelu_half", "softplus", "log")


def _inputs(name: str) -> np.ndarray:
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, 60_000).astype(np.int32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 20.0, 20.000002, 88.72, 88.73, -103.9, -104.1]
    sweeps = [np.linspace(-110, 95, 40_001), np.linspace(-2, 2, 20_001), special]
    x = np.concatenate([bits.view(np.float32), *(np.asarray(s, np.float32) for s in sweeps)])
    if name == "log":
        x = np.abs(x[np.isfinite(x) & (np.abs(x) > 1.2e-38)])
    return np.resize(x, -(-x.size // 16) * 16)


def _exact(name: str, x: np.ndarray) -> np.ndarray:
    z = x.astype(np.float64)
    y = 2 * np.sqrt(2 / np.pi) * z * (1 + 0.044715 * z * z)
    formulas: dict[str, Any] = {
        "exp": lambda: np.exp(z),
        "sigmoid": lambda: 1 / (1 + np.exp(-z)),
        "silu": lambda: z / (1 + np.exp(-z)),
        "tanh": lambda: np.tanh(z),
        "gelu_tanh": lambda: z / (1 + np.exp(-y)),
        "softplus": lambda: np.where(z > 20, z, np.log1p(np.exp(np.minimum(z, 20)))),
        "log": lambda: np.log(z),
    }
    return np.asarray(formulas[name]())


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(((a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("name", NAMES)
def test_four_forms_agree(name: str) -> None:
    function, x = getattr(mathfun, name), _inputs(name)

    @njit
    def scalars(x: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = function(x[i])

    @njit
    def vectors(x: Any, out: Any) -> None:
        for i in range(0, x.size, 16):
            store16(out, i, function(load16(x, i)))

    results = [np.empty_like(x) for _ in range(2)]
    scalars(x, results[0])
    vectors(x, results[1])
    with np.errstate(all="ignore"):
        array = function(x)
        single = np.array([function(value) for value in x[::101]], np.float32)
    assert array.dtype == np.float32
    assert _same(results[0], array)
    assert _same(results[1], array)
    assert _same(single, np.ascontiguousarray(array[::101]))


def test_gelu_half_is_gelu_between_float16() -> None:
    x = np.linspace(-12, 12, 100_001).astype(np.float32)
    half = x.astype(np.float16).astype(np.float32)
    expected = mathfun.gelu_tanh(half).astype(np.float16).astype(np.float32)
    expected[x <= -10] = 0
    expected[x >= 10] = x[x >= 10]
    np.testing.assert_array_equal(mathfun.gelu_half(x), expected)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gelu_half"])
def test_error_in_units_of_the_last_place(name: str) -> None:
    x = np.linspace(-80, 80, 300_001).astype(np.float32)
    x = x[x > 0] if name == "log" else x
    with np.errstate(all="ignore"):
        exact = _exact(name, x)
        error = np.abs(getattr(mathfun, name)(x) - exact)
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    if name == "gelu_tanh":  # far below zero, exp amplifies the rounding of its argument; there the value is small
        unit = np.maximum(unit, np.spacing(np.float32(0.3)))
    assert (error / unit).max() < 3


def test_limits() -> None:
    x = np.array([-np.inf, np.inf, -1000, 1000, np.nan], np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(mathfun.exp(x), [0, np.inf, 0, np.inf, np.nan])
        np.testing.assert_array_equal(mathfun.sigmoid(x), [0, 1, 0, 1, np.nan])
        np.testing.assert_array_equal(mathfun.tanh(x), [-1, 1, -1, 1, np.nan])
        np.testing.assert_array_equal(mathfun.softplus(x), [0, np.inf, 0, 1000, np.nan])
