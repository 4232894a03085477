"""Small model files for every test, written once a session by the repository's own generator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_tiny_gguf import make

from dotllm.kernels_cpu.cache import prepare_cache

prepare_cache()  # before a test imports kernels directly: stale ones must not be found


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_gguf(arch="qwen35", type="F32", **options)`: the path of such a file; options as in make_tiny_gguf.Options.

    The files are shared by all tests: copy one before changing it.
    """
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def tiny(arch: str = "qwen35", type: str = "F32", **options: Any) -> Path:
        key = repr((arch, type, sorted(options.items())))
        if key not in made:
            made[key] = make(folder / f"{len(made)}-{arch}-{type}.gguf", arch, type, **options)
        return made[key]

    return tiny
