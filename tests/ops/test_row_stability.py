"""The same bits on one thread or two, compiled for other instruction sets, and run by Python without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import op_cases
import pytest

from dotllm.kernels_cpu.backend import CpuOps


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return op_cases.digests(CpuOps(1))


def test_two_threads_change_nothing(expected: dict[str, str]) -> None:
    assert op_cases.digests(CpuOps(2, least_work=0)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"NUMBA_DISABLE_JIT": "1"},
        {"DOTLLM_ISA": "generic", "NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""},
    ],
    ids=["python", "generic"],
)
def test_other_machines_give_the_same_bits(expected: dict[str, str], settings: dict[str, str]) -> None:
    cases = Path(op_cases.__file__)
    environment = {**os.environ, **settings, "PYTHONPATH": str(cases.parents[2])}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(cases), "1"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name in expected if found.get(name) != expected[name]} == set()
