"""Dequantisation to the bit, against gguf-py where it knows the type and against recorded vectors of ggml elsewhere."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from quantize import quantize

from dotllm.errors import ModelFileError
from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.types import FORMATS, GGMLType

DATA = Path(__file__).parent.parent / "data"
PACKED = [type for type, block in FORMATS.items() if block.elements > 1]
RECORDED = [GGMLType.Q1_0, GGMLType.Q2_0]
FLOATS = [GGMLType.F32, GGMLType.F16, GGMLType.BF16]
# Greatest root mean square error, in standard deviations, of the plain quantiser on normal values
TOLERANCE = {"Q1_0": 0.61, "Q2_0": 0.4, "TQ1_0": 0.9, "TQ2_0": 0.9, "Q2_K": 0.35, "Q3_K": 0.17, "MXFP4": 0.13}


@pytest.mark.parametrize("type", [t for t in PACKED + FLOATS if t not in RECORDED], ids=lambda t: t.name)
def test_equals_gguf_py_on_random_bytes(type: GGMLType) -> None:
    raw = np.random.default_rng(int(type)).integers(0, 256, (5, 3, FORMATS[type].bytes * 4), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(type))).astype(np.float32)
    values = dequantize(raw, type)
    assert values.dtype == np.float32
    assert values.shape == (5, 3, FORMATS[type].elements * 4)
    np.testing.assert_array_equal(values, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("type", RECORDED, ids=lambda t: t.name)
def test_equals_recorded_vectors(type: GGMLType) -> None:
    with np.load(DATA / f"quant_{type.name}.npz") as recorded:
        np.testing.assert_array_equal(dequantize(recorded["raw"], type), recorded["values"])


@pytest.mark.parametrize(
    ("type", "dtype"), [("F64", "f8"), ("I8", "i1"), ("I16", "i2"), ("I32", "i4"), ("I64", "i8"), ("F16", "f2")]
)
def test_plain_types(type: str, dtype: str) -> None:
    numbers = np.array([[1, -2, 3], [0, 100, -128]], f"<{dtype}")
    np.testing.assert_array_equal(dequantize(numbers.view(np.uint8), GGMLType[type]), numbers.astype(np.float32))


def test_does_not_write_through_to_the_file() -> None:
    raw = np.ones(4, np.float32).view(np.uint8)
    dequantize(raw, GGMLType.F32)[...] = 7.0
    assert (raw.view(np.float32) == 1.0).all()


def test_rows_that_are_not_whole_blocks() -> None:
    with pytest.raises(ModelFileError, match="Q4_K blocks of 144"):
        dequantize(np.zeros((2, 145), np.uint8), GGMLType.Q4_K)


@pytest.mark.parametrize("type", PACKED + FLOATS, ids=lambda t: t.name)
def test_the_quantiser_of_the_tools_inverts(type: GGMLType) -> None:
    values = np.random.default_rng(1).normal(0.0, 0.1, (6, 512)).astype(np.float32)
    values[2] = 0.0
    raw = quantize(values, type)
    assert raw.shape == (6, 512 // FORMATS[type].elements * FORMATS[type].bytes)
    back = dequantize(raw, type)
    assert np.sqrt(np.mean((back - values)[values != 0] ** 2)) < 0.1 * TOLERANCE.get(type.name, 0.1)
    assert not back[2].any()


def test_every_format_names_its_own_type() -> None:
    assert all(block.type is type for type, block in FORMATS.items())
    assert FORMATS[GGMLType.Q5_1].activation == "Q8_1"
    assert FORMATS[GGMLType.TQ1_0].activation == "Q8_K"
    assert FORMATS[GGMLType.Q2_0].activation == "Q8_0"
