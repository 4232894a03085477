"""One tiny model of each kind, loaded once a module on each backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Lab

from dotllm.ops.reference import NumpyOps


@pytest.fixture(scope="session")
def hybrid(tiny_gguf: Callable[..., Path]) -> Lab:
    """Recurrent and attention layers, quantised."""
    return Lab(tiny_gguf("qwen35", "Q8_0"), NumpyOps())


@pytest.fixture(scope="session")
def dense(tiny_gguf: Callable[..., Path]) -> Lab:
    """Attention only."""
    return Lab(tiny_gguf("qwen3", "F32"), NumpyOps())
