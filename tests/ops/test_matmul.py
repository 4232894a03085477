"""Products with quantised weights: right, the same for every row count, thread count, instruction set and in Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matmul_cases import digests, random_weights

from dotllm.errors import BackendUnavailable, UnsupportedModel
from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.types import FORMATS, GGMLType
from dotllm.kernels_cpu.decode import DECODERS, decode_block
from dotllm.kernels_cpu.formats import R16, repack
from dotllm.kernels_cpu.isa import choose_isa
from dotllm.kernels_cpu.machine_py import PyMachine
from dotllm.kernels_cpu.matmul import load_weight, matmul, matmul_gathered
from dotllm.kernels_cpu.quantize import quantize

NAIVE = ["F32", "F16", "Q1_0", "TQ1_0"]  # one of each kind of activation; the others differ in `decode_block` only
CASES = [*R16, *NAIVE]


def _product(name: str, rows: int, columns: int, x: np.ndarray, threads: int = 1, naive: bool = False) -> np.ndarray:
    type = GGMLType[name]
    weight = load_weight(type, random_weights(type, rows, columns), naive=naive)
    out = np.full((len(x), rows), np.nan, np.float32)
    matmul(weight, quantize(x, FORMATS[type].activation, 1), out, None, False, threads)
    return out


def _exact(name: str, rows: int, columns: int, x: np.ndarray) -> np.ndarray:
    """In float64, from the rounded activations."""
    type = GGMLType[name]
    raw, rounded = random_weights(type, rows, columns), quantize(x, FORMATS[type].activation, 1)
    y = rounded.dequantized().astype(np.float64) @ dequantize(raw, type).astype(np.float64).T
    if rounded.kind == "Q8_1":
        mins = raw.reshape(rows, -1, FORMATS[type].bytes)[..., 2:4].copy().view(np.float16)[..., 0]
        y += rounded.sum_error().astype(np.float64) @ mins.astype(np.float64).T
    return y


def _rows(count: int, columns: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, columns)).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_product_is_right(name: str) -> None:
    x = _rows(3, 512)
    exact = _exact(name, 40, 512, x)
    assert np.abs(_product(name, 40, 512, x) - exact).max() < 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("name", R16)
def test_interleaved_agrees_with_naive(name: str) -> None:
    x = _rows(5, 512)
    naive = _product(name, 40, 512, x, naive=True)
    assert np.abs(_product(name, 40, 512, x) - naive).max() < 1e-5 * np.abs(naive).max()


@pytest.mark.parametrize("name", CASES)
def test_row_does_not_depend_on_the_others(name: str) -> None:
    x = _rows(512, 256)
    alone = np.concatenate([_product(name, 20, 256, row[None]) for row in x[:70]])
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 64, 512):
        for threads in (1, 2):
            together = _product(name, 20, 256, x[:count], threads)
            np.testing.assert_array_equal(together[:70], alone[:count])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "F16"])
def test_threads_do_not_change_bits(name: str) -> None:
    x = _rows(3, 1024)
    np.testing.assert_array_equal(_product(name, 600, 1024, x, 1), _product(name, 600, 1024, x, 2))


def test_mxfp4_exponents_below_the_smallest_normal_float() -> None:
    raw = random_weights(GGMLType.MXFP4, 16, 32)
    raw[:, 0] = [0, 1, 2, 3, *range(10, 210, 20), 210, 211]
    x = np.arange(-127, 128, 8, dtype=np.float32)[None] * np.float32(1024)  # rounded without error
    out = np.empty((1, 16), np.float32)
    matmul(load_weight(GGMLType.MXFP4, raw), quantize(x, "Q8_0", 1), out, None, False, 1)
    exact = x.astype(np.float64) @ dequantize(raw, GGMLType.MXFP4).astype(np.float64).T
    assert np.all(out != 0)
    np.testing.assert_array_equal(out, exact)


def test_bias_and_adding() -> None:
    type, x = GGMLType.Q8_0, _rows(3, 64)
    weight, rounded = load_weight(type, random_weights(type, 20, 64)), quantize(x, "Q8_0", 1)
    plain, out = np.empty((3, 20), np.float32), np.ones((3, 20), np.float32)
    bias = np.linspace(-1, 1, 20, dtype=np.float32)
    matmul(weight, rounded, plain, None, False, 1)
    matmul(weight, rounded, out, bias, True, 1)
    np.testing.assert_array_equal(out, np.float32(1) + (plain + bias))


@pytest.mark.parametrize("name", ["Q4_0", "F32"])
def test_gathered_reads_the_rows_of_the_expert(name: str) -> None:
    type, x = GGMLType[name], _rows(9, 256)
    raw = np.stack([random_weights(type, 24, 256, seed) for seed in range(4)])
    rounded = quantize(x, FORMATS[type].activation, 1)
    rows = np.array([0, 0, 3, 8, 3, 5, 6, 7, 1], np.int32)
    experts = np.array([3, 1, 3, 3, 0, 3, 3, 0, 3], np.int32)
    out = np.empty((9, 24), np.float32)
    matmul_gathered(load_weight(type, raw), rounded, rows, experts, out, 2)
    for pair in range(9):
        alone = np.empty((1, 24), np.float32)
        one = quantize(x[rows[pair]][None], FORMATS[type].activation, 1)
        matmul(load_weight(type, raw[experts[pair]]), one, alone, None, False, 1)
        np.testing.assert_array_equal(out[pair], alone[0])


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_weights_of_odd_width(name: str) -> None:
    x = _rows(2, 37)
    exact = _exact(name, 5, 37, x)
    fast = _product(name, 5, 37, x)
    assert np.abs(fast - exact).max() < 1e-6 * np.abs(exact).max()
    np.testing.assert_array_equal(fast, _product(name, 5, 37, x, naive=True))


@pytest.mark.parametrize("name", list(DECODERS))
def test_block_decoder_gives_the_bits_of_dequantize(name: str) -> None:
    type = GGMLType[name]
    block, raw = FORMATS[type], random_weights(GGMLType[name], 4, 256)
    python = {key: getattr(value, "py_func", value) for key, value in DECODERS.items()}
    out = np.zeros((4, 256), np.float32)
    for row in range(4):
        for b in range(256 // block.elements):
            python[name](raw[row], b * block.bytes, out[row], b * block.elements)
    np.testing.assert_array_equal(out, dequantize(raw, type))
    assert decode_block.__doc__


def _elsewhere(names: list[str], rows: int, columns: int, **environment: str) -> list[str]:
    script = Path(__file__).with_name("matmul_cases.py")
    process = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(rows), str(columns), "3", *names],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split("\n")[:-1]


def test_same_bits_without_compilation() -> None:
    assert _elsewhere(CASES, 20, 256, NUMBA_DISABLE_JIT="1") == digests(20, 256, 3, CASES)


def test_same_bits_on_generic_vectors() -> None:
    names = ["Q8_0", "Q4_K", "Q6_K", "Q5_0", "MXFP4", "IQ4_XS", "Q3_K"]  # every instruction of the machine
    there = _elsewhere(names, 20, 512, DOTLLM_ISA="generic", NUMBA_CPU_NAME="x86-64-v3", NUMBA_CPU_FEATURES="")
    assert there == digests(20, 512, 3, names)


def test_python_form_refuses_to_leave_its_arrays() -> None:
    layout = R16["Q8_0"]
    raw = random_weights(layout.type, 16, 64)
    weights = np.zeros((1, 2, layout.block_bytes), np.uint8)
    repack(layout, raw, weights)
    x = quantize(_rows(1, 64), "Q8_0", 1)
    flat = [array.reshape(-1) for array in (x.values, x.scales, x.sums, x.offsets)]
    beyond = PyMachine(weights.reshape(-1), 2 * layout.block_bytes, 32, *flat, (0,), 1, 2, 1)
    with pytest.raises(IndexError):
        layout.micro(beyond, [np.zeros(16, np.float32)])
    wrong_row = PyMachine(weights.reshape(-1), 0, 32, *flat, (1,), 0, 2, 1)
    with pytest.raises(IndexError):
        layout.micro(wrong_row, [np.zeros(16, np.float32)])


def test_mistakes_are_refused() -> None:
    weight = load_weight(GGMLType.Q8_0, np.stack([random_weights(GGMLType.Q8_0, 16, 64)] * 2))
    x, out = quantize(_rows(2, 64), "Q8_0", 1), np.empty((2, 16), np.float32)
    one, two = np.zeros(2, np.int32), np.array([0, 2], np.int32)
    with pytest.raises(ValueError, match="outside"):
        matmul_gathered(weight, x, one, two, out, 1)
    with pytest.raises(ValueError, match="outside"):
        matmul_gathered(weight, x, two, one, out, 1)
    with pytest.raises(ValueError, match="Q8_0 rows of 64"):
        matmul_gathered(weight, quantize(_rows(2, 64), "F16", 1), one, one, out, 1)
    with pytest.raises(UnsupportedModel, match="IQ2_XXS"):
        load_weight(GGMLType.IQ2_XXS, np.zeros((16, 66), np.uint8))


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_isa("generic") == "generic"
    with pytest.raises(BackendUnavailable, match="unknown"):
        choose_isa("mmx")
    monkeypatch.setattr("dotllm.kernels_cpu.isa.cpu_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("DOTLLM_ISA", raising=False)
    assert choose_isa() == "avx2"
    with pytest.raises(BackendUnavailable, match="avx512vnni"):
        choose_isa("vnni")
    monkeypatch.setattr("dotllm.kernels_cpu.isa.cpu_features", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(BackendUnavailable, match="f16c"):
        choose_isa()


def test_same_bits_with_vnni() -> None:
    try:
        choose_isa("vnni")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    names = list(R16)
    assert _elsewhere(names, 20, 512, DOTLLM_ISA="vnni") == _elsewhere(names, 20, 512, DOTLLM_ISA="avx2")
