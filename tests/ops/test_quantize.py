"""Activation rounding: the bits of ggml's CPU code, in NumPy and in kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dotllm.kernels_cpu.quantize import quantize
from dotllm.ops.rounding import Rounded, quantize_rows

GGML = Path(__file__).parent.parent / "data" / "quantize_ggml.npz"


def _ggml_bytes(x: Rounded) -> np.ndarray:
    """Blocks as ggml stores them."""
    rows = len(x.values)
    block = 256 if x.kind == "Q8_K" else 32
    q = x.values.reshape(rows, -1, block).view(np.uint8)
    if x.kind == "Q8_K":
        scales = x.scales[..., None].view(np.uint8)
        sums = x.sums.reshape(rows, -1, 16).astype(np.int16).view(np.uint8)
        return np.concatenate([scales, q, sums], axis=-1)
    with np.errstate(over="ignore"):
        scales = x.scales.astype(np.float16)[..., None].view(np.uint8)
        offsets = x.offsets.astype(np.float16)[..., None].view(np.uint8)
    return np.concatenate([scales, q] if x.kind == "Q8_0" else [scales, offsets, q], axis=-1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q8_1", "Q8_K"])
@pytest.mark.parametrize("compiled", [False, True])
def test_bits_of_ggml(kind: str, compiled: bool) -> None:
    data = np.load(GGML)
    rounded = quantize(data["x"], kind, 1) if compiled else quantize_rows(data["x"], kind)
    np.testing.assert_array_equal(_ggml_bytes(rounded), data[kind.lower()])


def _hard_rows() -> np.ndarray:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((400, 512)).astype(np.float32)
    x *= (10.0 ** rng.integers(-44, 38, 400))[:, None].astype(np.float32)
    x[0], x[1], x[4] = 0, 1e-42, -3
    x[2, 5], x[3, 7], x[6, 100], x[7] = np.inf, np.nan, -np.inf, np.nan
    x[5, 32:64] = 0
    return x


@pytest.mark.parametrize("kind", ["Q8_0", "Q8_1", "Q8_K", "F16", "BF16", "F32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_kernel_and_numpy_agree(kind: str, threads: int) -> None:
    x = _hard_rows()
    kernel, reference = quantize(x, kind, threads), quantize_rows(x, kind)
    for name in ("values", "scales", "sums", "offsets"):
        a, b = getattr(kernel, name), getattr(reference, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    if kernel.values.dtype == np.int8:
        assert kernel.values.min() >= -127


def test_float_rows_are_padded_with_zeros() -> None:
    x = np.ones((2, 37), np.float32)
    for kind in ("F16", "BF16", "F32"):
        rounded = quantize(x, kind, 1)
        assert rounded.values.shape == (2, 48)
        assert not rounded.values[:, 37:].any()
        np.testing.assert_array_equal(rounded.dequantized(), x)


def test_error_of_the_sums() -> None:
    rounded = quantize_rows(np.full((1, 32), 0.3, np.float32), "Q8_1")
    exact = rounded.scales.astype(np.float64) * rounded.sums
    assert rounded.sum_error()[0, 0] == np.float32(rounded.offsets[0, 0] - np.float32(exact[0, 0]))
