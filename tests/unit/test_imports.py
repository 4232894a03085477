"""Who may import whom: the rule of tools/budget.py, on the tree and on modules that break it."""

from __future__ import annotations

from pathlib import Path

import budget
import pytest


def test_the_tree_imports_only_downwards() -> None:
    assert budget.tree_faults() == []


def test_every_module_of_the_tree_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "dotllm" / "state").mkdir(parents=True)
    (tmp_path / "dotllm" / "state" / "kv.py").write_text("from dotllm.engine.engine import Engine\n")
    (fault,) = budget.tree_faults(tmp_path)
    assert fault.startswith("dotllm.state.kv:1: imports dotllm.engine.engine; state may import ")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gguf.reader", "from dotllm.text.tokenizer import Tokenizer"),
        ("models.llama", "import numba"),
        ("models.llama", "from dotllm.kernels_cpu.matmul import matmul"),
        ("models.llama", "from dotllm.ops.select import select"),
        ("ops.reference", "from dotllm.kernels_cpu import matmul"),
        ("ops.reference", "from dotllm import kernels_cpu"),
        ("engine.engine", "import dotllm.kernels_cpu.matmul"),
        ("engine.engine", "from dotllm.ops.select import select"),
        ("kernels_cpu.matmul", "from dotllm.models.llama import Llama"),
        ("kernels_cpu.matmul", "from dotllm.gguf import reader"),
        ("engine.engine", "from fastapi import FastAPI"),
        ("engine.engine", "import rich.progress"),
        ("sampling.chain", "from ..state import manager"),
        ("sampling.chain", "def late():\n    from dotllm.engine import engine"),
        ("errors", "from dotllm.config import Config"),
        ("surprise.module", "import os"),
    ],
)
def test_an_import_upwards_is_a_fault(module: str, source: str) -> None:
    assert len(budget.import_faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops.select", "from dotllm.kernels_cpu.ops import CpuOps"),
        ("kernels_cpu.matmul", "import numba\nfrom numba import njit\nfrom dotllm.gguf import types"),
        ("kernels_cuda.device", "from numba import cuda"),
        ("models.qwen35", "from dotllm.models.base import Model\nfrom dotllm.ops.protocol import Ops"),
        ("models.qwen35", "from . import base"),
        ("models.qwen35", "from ..state import recurrent"),
        ("engine.engine", "from dotllm.spec.verify import verify"),
        ("server.app", "from fastapi import FastAPI"),
        ("cli.app", "import typer\nfrom dotllm import __version__"),
        ("text.tokenizer", "import numpy as np\nimport regex"),
    ],
)
def test_an_import_downwards_is_fine(module: str, source: str) -> None:
    assert budget.import_faults(source, module) == []


def test_the_table_has_no_circle() -> None:
    order = [name for name in budget.MAY_IMPORT if name not in ("__main__", "__init__")]
    below = {name: {allowed.split(".")[0] for allowed in budget.MAY_IMPORT[name]} for name in order}
    for name in order:
        if name.startswith(("ops", "kernels")):  # these meet in one module, ops.protocol, which imports neither
            continue
        seen, todo = set(), list(below[name])
        while todo:
            part = todo.pop()
            if part not in seen:
                seen.add(part)
                todo += below[part]
        assert name not in seen, f"{name} can reach itself"
