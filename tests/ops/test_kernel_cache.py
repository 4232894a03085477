"""Compiled kernels are found again by the next process, and never by one with other sources or settings."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dotllm.kernels_cpu import cache

SCRIPT = """
import json, sys
from dotllm.kernels_cpu.cache import prepare_cache
prepare_cache()
sys.path.insert(0, sys.argv[1])
from matmul_cases import digests
from dotllm.kernels_cpu import product, quantize
from dotllm.kernels_cpu.isa import choose_isa
lines = digests(20, 256, 3, ["Q8_0", "Q4_K"])
kernels = [product.interleaved_product(name, choose_isa()) for name in ("Q8_0", "Q4_K")]
kernels += [quantize.round_32_part, quantize.round_256_part]
misses = sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels)
hits = sum(sum(kernel.stats.cache_hits.values()) for kernel in kernels)
print(json.dumps([lines, misses, hits]))
"""


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> Any:
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300)
        return json.loads(done.stdout)

    first, second = run(), run()
    assert first[0] == second[0]
    assert (first[1], second[1]) == (4, 0)
    assert second[2] == 4
    for name, damage in (
        ("round_32_part-*.nbi", b""),
        ("round_256_part-*.nbi", b"\x93garbage"),
        ("Q8_0*.nbc", b"\x80\x04\x95"),
    ):
        (path,) = tmp_path.rglob(f"*{name}")  # as a crash of the machine leaves them
        path.write_bytes(damage)
    mended = run()
    assert mended[0] == first[0]
    assert mended[1:] == [3, 1]


def test_only_damaged_files_are_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folder = tmp_path / cache.digest() / "kernels"
    folder.mkdir(parents=True)
    whole = pickle.dumps(["a", 2.0])
    contents = {
        "whole.nbi": 2 * whole,
        "whole.nbc": whole,
        "empty.nbi": b"",
        "cut.nbc": whole[:-1],
        "zeros.nbc": bytes(9),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    cache.prepare_cache()
    assert sorted(path.name for path in folder.iterdir()) == ["whole.nbc", "whole.nbi"]


ADDRESSES = """
import sys
from dotllm.kernels_cpu.cache import prepare_cache
prepare_cache()
from dotllm.kernels_cpu.isa import choose_isa
from dotllm.kernels_cpu.executor import address_of
from dotllm.kernels_cpu.product import ARGUMENTS, interleaved_product
kernels = [interleaved_product(name, choose_isa()) for name in sys.argv[1:]]
print(*(address_of(kernel, ARGUMENTS) for kernel in kernels))
"""


def test_kernels_compiled_by_different_processes_stay_apart(tmp_path: Path) -> None:
    """Numba's names for closures of one factory repeat from process to process; ours may not."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for names in (["Q8_0"], ["Q4_0"], ["Q8_0", "Q4_0"]):
        command = [sys.executable, "-c", ADDRESSES, *names]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300)
    assert len(set(done.stdout.split())) == 2


def test_folder_depends_on_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folder = cache.prepare_cache()
    assert folder.parent == tmp_path
    assert cache.prepare_cache() == folder  # a second call changes nothing
    before = cache.digest()
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert cache.digest() == before
    monkeypatch.setenv("DOTLLM_ISA", "generic")
    generic = cache.digest()
    monkeypatch.setenv("NUMBA_OPT", "2")
    assert len({before, generic, cache.digest()}) == 3


def test_compiling_tells_whether_a_kernel_was_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        with cache.compiling() as compiled:
            assert not compiled()
    with cache.compiling() as compiled:
        folder = cache.prepare_cache() / "kernels_cpu"
        folder.mkdir()
        (folder / "norm.1.nbc").touch()
        assert compiled()


def test_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        folder = cache.prepare_cache()
    assert folder.is_dir()
    assert "NUMBA_CACHE_DIR" in caplog.text
