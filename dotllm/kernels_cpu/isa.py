"""Which instructions the kernels use: AVX-512 VNNI, AVX2, or plain vectors. Imports no Numba.

The results do not depend on the choice; `DOTLLM_ISA` forces one, for tests and for hunting faults.
"""

from __future__ import annotations

import os
import platform
from functools import cache

from dotllm.errors import BackendUnavailable

__all__ = ["ISAS", "Isa", "choose_isa", "cpu_features"]

Isa = str
ISAS: tuple[Isa, ...] = ("vnni", "avx2", "generic")

_NEEDS = {"vnni": {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}, "avx2": {"avx2", "fma", "f16c"}, "generic": set()}


@cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what this CPU can do, and its name as `cpu:<name>`."""
    from llvmlite import binding  # here, because it takes as long as the rest of a command without kernels

    features = {name for name, present in binding.get_host_cpu_features().items() if present}
    return frozenset(features | {f"cpu:{binding.get_host_cpu_name()}"})


def choose_isa(wanted: str | None = None) -> Isa:
    """The best instruction set that the CPU has, or the one that `wanted` or DOTLLM_ISA names.

    Raises BackendUnavailable if the CPU lacks it, or is older than x86-64-v3 (AVX2, FMA, F16C).
    """
    wanted = wanted or os.environ.get("DOTLLM_ISA") or None
    if wanted is not None and wanted not in ISAS:
        raise BackendUnavailable(f"DOTLLM_ISA={wanted} is unknown: choose one of {', '.join(ISAS)}, or unset it")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    features = cpu_features()
    if x86 and not _NEEDS["avx2"] <= features:
        missing = ", ".join(sorted(_NEEDS["avx2"] - features))
        raise BackendUnavailable(f"this CPU lacks {missing}: the CPU backend needs AVX2, FMA and F16C (2013 or later)")
    available = [isa for isa in ISAS if _NEEDS[isa] <= features and (x86 or isa == "generic")]
    if wanted is None:
        return available[0]
    if wanted not in available:
        missing = ", ".join(sorted(_NEEDS[wanted] - features)) or "the x86-64 architecture"
        raise BackendUnavailable(
            f"DOTLLM_ISA={wanted} asks for instructions that this CPU lacks ({missing}): unset it, "
            f"or use {' or '.join(available)}"
        )
    return wanted
