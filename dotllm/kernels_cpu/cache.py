"""Where compiled kernels are kept between processes.

Numba's own key holds a kernel's source and the CPU, but not the other files that it was built from, nor flags; so each
set of kernels has a folder of its own, named by a digest of everything that could change a compiled kernel.
This module must run before Numba is imported and imports none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from dotllm.kernels_cpu.isa import choose_isa, cpu_features

__all__ = ["compiling", "digest", "prepare_cache"]

logger = logging.getLogger(__name__)

# sources outside this package whose text or constants are compiled into kernels
_BEYOND = (
    "ops/float32.py",
    "ops/mathfun.py",
    "ops/protocol.py",
    "ops/rounding.py",
    "gguf/types.py",
    "gguf/dequantize.py",
)


def digest() -> str:
    """Sixteen hex digits over kernel sources, versions, instruction set, CPU features and NUMBA_* flags."""
    package = Path(__file__).resolve().parent
    sources = sorted(package.glob("*.py")) + [package.parent / name for name in _BEYOND]
    state = hashlib.sha256()
    for source in sources:
        state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    parts = [choose_isa(), platform.machine(), sys.version, *sorted(cpu_features())]
    parts += [f"{name} {importlib.metadata.version(name)}" for name in ("numba", "llvmlite", "numpy")]
    parts += [f"{key}={value}" for key, value in sorted(os.environ.items()) if _changes_code(key)]
    state.update("\n".join(parts).encode())
    return state.hexdigest()[:16]


def _changes_code(key: str) -> bool:
    return key.startswith("NUMBA_") and key not in ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER")


def prepare_cache() -> Path:
    """Point NUMBA_CACHE_DIR at the folder of this set of kernels and return it; call once, before importing Numba.

    The folder lies below the user's cache directory, or below NUMBA_CACHE_DIR where that is set. If it cannot be
    written, kernels are kept in a temporary folder for this process tree only, and a warning says so.
    """
    current = os.environ.get("NUMBA_CACHE_DIR")
    name = digest()
    if current and Path(current).name == name:  # a child process inherits the prepared value
        return Path(current)
    base = Path(current) if current else user_cache_path("dotllm", appauthor=False) / "jit"
    folder = base / name
    if not _writable(folder):
        folder = Path(tempfile.mkdtemp(prefix="dotllm-jit-")) / name
        folder.mkdir()
        logger.warning(
            "cannot write compiled kernels below %s: they go to %s and will be compiled again next time; "
            "set NUMBA_CACHE_DIR to a folder that can be written",
            base,
            folder,
        )
    _drop_damaged(folder)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    return folder


def _drop_damaged(folder: Path) -> None:
    """Remove files that a full disk or a crash of the machine cut off: Numba would stumble over them for ever."""
    for path in folder.rglob("*.nb[ci]"):
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                begins, size = file.read(1), file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                ends = file.read(1)
            if (begins, ends) != (b"\x80", b"."):  # of every pickle
                logger.warning("%s is damaged; the kernel is compiled again", path)
                path.unlink()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def compiling() -> Iterator[Callable[[], bool]]:
    """Hold the folder's lock, so that two processes that start together do not compile the same kernels twice.

    Gives a function that tells whether a kernel has been compiled and stored since.
    """
    folder = prepare_cache()
    with FileLock(str(folder / "lock")):
        before = _stored(folder)
        yield lambda: _stored(folder) > before


def _stored(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.nbc"))
