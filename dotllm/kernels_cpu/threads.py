"""How many threads kernels run on, and which of Numba's threading layers starts them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numba
from numba.np.ufunc import parallel

from dotllm.errors import BackendUnavailable, UsageError

__all__ = ["choose_layer", "default_threads", "set_threads"]

logger = logging.getLogger(__name__)


def default_threads() -> int:
    """Physical cores that this process may run on (by its affinity mask), at most Numba's limit."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(), int(numba.config.NUMBA_NUM_THREADS)))


def _core_of(cpu: int) -> str:
    """The hyper-threads that share a core with `cpu`, as Linux names them; elsewhere each CPU counts as a core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """CPUs that a container's cgroup grants, rounded up; a large number where there is no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1 << 16 if limit == "max" else max(1, -(-int(limit) // int(period)))
    except (OSError, ValueError):
        return 1 << 16


def choose_layer() -> str:
    """Choose and start the threading layer: omp, else tbb, else workqueue with a logged hint. Returns its name."""
    if not numba.config.DISABLE_JIT and "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    parallel._launch_threads()
    layer = str(numba.threading_layer())
    if layer == "workqueue":
        logger.warning(
            "threads start through Numba's workqueue layer, which costs ~80 us a pass of the model: install an OpenMP "
            "runtime (libgomp1), or `pip install tbb`, for more speed on small models"
        )
    return layer


def set_threads(count: int | None) -> int:
    """Run kernels on `count` threads (None: one per physical core) and return the count. Affects the calling thread.

    Raises UsageError if `count` is not positive, BackendUnavailable if it exceeds what Numba was started with.
    """
    wanted = default_threads() if count is None else count
    if wanted < 1:
        raise UsageError(f"the number of threads must be at least 1, not {wanted}")
    limit = int(numba.config.NUMBA_NUM_THREADS)
    if wanted > limit:
        raise BackendUnavailable(
            f"{wanted} threads were asked for, but this process has {limit}: set NUMBA_NUM_THREADS"
        )
    numba.set_num_threads(wanted)
    return wanted
