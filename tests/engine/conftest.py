"""One tiny model of each kind, loaded once a session; both backends take part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Lab

from dotllm.ops.reference import NumpyOps
from dotllm.ops.select import select_ops


@pytest.fixture(scope="session")
def hybrid(tiny_gguf: Callable[..., Path]) -> Lab:
    """Recurrent and attention layers, quantised, on the kernels."""
    return Lab(tiny_gguf("qwen35", "Q8_0"), select_ops("cpu", 2))


@pytest.fixture(scope="session")
def hybrid_numpy(tiny_gguf: Callable[..., Path]) -> Lab:
    """The same on the definition."""
    return Lab(tiny_gguf("qwen35", "Q8_0"), NumpyOps())


@pytest.fixture(scope="session")
def dense(tiny_gguf: Callable[..., Path]) -> Lab:
    """Attention only, on the definition."""
    return Lab(tiny_gguf("qwen3", "F32"), NumpyOps())
