"""From the name of a backend to its ops: the only module that imports kernels, and only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from dotllm.errors import BackendUnavailable, UsageError
from dotllm.ops.protocol import Ops

__all__ = ["BACKENDS", "compiling", "select_ops"]

BACKENDS = ("cpu", "numpy")


def select_ops(name: str, threads: int | None = None) -> Ops:
    """The ops of a backend, on so many threads where it has any (None: its own choice).

    Raises UsageError for a name that is none, BackendUnavailable if the backend does not run on this machine.
    """
    if name == "numpy":
        from dotllm.ops.reference import NumpyOps

        return cast(Ops, NumpyOps())
    if name != "cpu":
        raise UsageError(f"there is no backend {name!r}; choose from: {', '.join(BACKENDS)}")
    from dotllm.kernels_cpu.cache import prepare_cache

    prepare_cache()  # before Numba is imported: it reads its settings then
    try:
        from dotllm.kernels_cpu.backend import CpuOps
    except ImportError as error:
        raise BackendUnavailable(
            f"the cpu backend cannot be loaded ({error}); reinstall numba, or choose --backend numpy, which is slow"
        ) from error
    return cast(Ops, CpuOps(threads))


@contextmanager
def compiling(ops: Ops) -> Iterator[Callable[[], bool]]:
    """Hold while kernels may be compiled: two processes that start together then do not compile the same ones.

    Gives a function that tells whether one has been compiled since.
    """
    if ops.name != "cpu":
        yield lambda: False
        return
    from dotllm.kernels_cpu import cache

    with cache.compiling() as compiled:
        yield compiled
