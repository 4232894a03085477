"""Hold the tree to its budgets: file and function length, who may import whom, and what starting the program imports.

Usage: python tools/budget.py [--time]       silent and 0 when all is well, else one line a fault and 1
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

__all__ = [
    "MAY_IMPORT",
    "ONLY",
    "import_faults",
    "length_faults",
    "main",
    "startup_faults",
    "startup_seconds",
    "tree_faults",
]

# ---- the architecture ------------------------------------------------------------------------------------------------
# From the ground up: what each part of dotllm/ may import of the others. A name stands for itself and all below it;
# every part sees itself; a module with a line of its own (such as ops.select) follows that line and not its part's.
BASE = ("errors", "config", "batch")
DEFINITIONS = ("ops.protocol", "ops.float32", "ops.mathfun", "ops.rounding")  # shared by every implementation
KERNELS = ("errors", "gguf.types", "gguf.dequantize", *DEFINITIONS)
LOADING = ("errors", "gguf", *DEFINITIONS, "ops.rope")

MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "errors": (),
    "config": ("errors",),
    "batch": ("errors", "config"),
    "gguf": BASE,
    "text": (*BASE, "gguf"),
    "kernels_cpu": KERNELS,
    "kernels_cpu.backend": LOADING,
    "kernels_cuda": KERNELS,
    "kernels_cuda.backend": LOADING,
    "ops": (*BASE, "gguf"),
    "ops.select": (*BASE, "gguf", "ops", "kernels_cpu", "kernels_cuda"),
    "state": (*BASE, "ops.protocol"),
    "models": (*BASE, "gguf", "ops.protocol", "ops.rope", "state"),
    "sampling": BASE,
    "constraints": (*BASE, "text"),
    "spec": (*BASE, "ops.protocol", "models", "state", "sampling", "constraints"),
    "engine": (*BASE, "gguf", "text", "ops.protocol", "models", "state", "sampling", "constraints", "spec"),
    "server": (*BASE, "gguf", "text", "ops", "models", "state", "sampling", "constraints", "spec", "engine"),
    "cli": (*BASE, "gguf", "text", "ops", "models", "state", "sampling", "constraints", "spec", "engine", "server"),
    "__main__": ("cli",),
    "__init__": (),
}

# Packages from outside that belong to one part each.
ONLY: Mapping[str, tuple[str, ...]] = {
    "numba": ("kernels_cpu", "kernels_cuda"),
    "llvmlite": ("kernels_cpu", "kernels_cuda"),
    "tokenizers": ("text",),
    "jinja2": ("text",),
    "llguidance": ("constraints",),
    "fastapi": ("server",),
    "uvicorn": ("server",),
    "prometheus_client": ("server",),
    "typer": ("cli",),
    "rich": ("cli",),
    "prompt_toolkit": ("cli",),
}

FILE_LINES = 400
FUNCTION_LINES = 60
MEASURED = ("dotllm", "tools", "tests")
LATE = ("numba", "llvmlite", "tokenizers")
"""Too slow to load before they are needed: neither `import dotllm` nor `dotllm --help` may bring them in."""
HELP_SECONDS = 0.3

REASON = re.compile(r"budget:\s*\w")
ROOT = Path(__file__).resolve().parent.parent


# ---- lengths ---------------------------------------------------------------------------------------------------------
def length_faults(source: str, name: str) -> list[str]:
    """Faults of one file: too long, or a function too long, without a line that says why ("budget: ...")."""
    lines = source.splitlines()
    faults = []
    if len(lines) > FILE_LINES and not REASON.search(lines[0]):
        faults.append(f"{name}: {len(lines)} lines; at most {FILE_LINES}, or a first line with 'budget: reason'")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES and not REASON.search(lines[node.lineno - 1]):
            faults.append(
                f"{name}:{node.lineno}: {node.name} has {length} lines; at most {FUNCTION_LINES}, "
                "or '# budget: reason' on its def line"
            )
    return faults


# ---- imports ---------------------------------------------------------------------------------------------------------
def _imports(tree: ast.AST, package: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, dotted names that may justify it) of every import; `from a import b` is justified by a and by a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, (alias.name,)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(filter(None, [*parents[: len(parents) - node.level + 1], base]))
            yield from ((node.lineno, (base, f"{base}.{alias.name}")) for alias in node.names)


def _under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def import_faults(source: str, module: str) -> list[str]:
    """Faults of one module of the package, named by its dotted path below dotllm (such as "ops.select")."""
    part = module.split(".")[0]
    allowed = MAY_IMPORT.get(module, MAY_IMPORT.get(part))
    if allowed is None:
        return [f"dotllm.{module}: a part that tools/budget.py does not know; give it a line in MAY_IMPORT"]
    justified = ["dotllm.__version__", *(f"dotllm.{name}" for name in (part, *allowed))]
    faults = {}
    for line, names in _imports(ast.parse(source), f"dotllm.{module}".rpartition(".")[0]):
        name, top = names[0] if names[0] != "dotllm" else names[-1], names[0].split(".")[0]
        where = f"dotllm.{module}:{line}: imports {name}"
        if top == "dotllm" and not any(_under(n, justified) for n in names):
            faults[where] = f"{part} may import {', '.join(allowed) or 'nothing of dotllm'}"
        elif top in ONLY and part not in ONLY[top]:
            faults[where] = f"only {', '.join(ONLY[top])} may"
    return [f"{where}; {rule}" for where, rule in faults.items()]


def tree_faults(root: Path = ROOT) -> list[str]:
    """Import faults of every module below root/dotllm."""
    faults = []
    for path in sorted((root / "dotllm").rglob("*.py")):
        parts = path.relative_to(root / "dotllm").with_suffix("").parts
        faults += import_faults(path.read_text("utf-8"), ".".join(parts))
    return faults


# ---- starting --------------------------------------------------------------------------------------------------------
_HELP = "import runpy, sys; sys.argv = ['dotllm', '--help']\ntry: runpy.run_module('dotllm', run_name='__main__')\n"
_HELP += "except SystemExit as e: assert not e.code, e.code\n"
_LOADED = "import sys; print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"


def startup_faults(root: Path = ROOT) -> list[str]:
    """Faults of `import dotllm` and `python -m dotllm --help`: a failure, or a slow package loaded on the way."""
    faults = []
    for what, code in (("import dotllm", "import dotllm\n"), ("dotllm --help", _HELP)):
        done = subprocess.run(
            [sys.executable, "-c", code + _LOADED], cwd=root, capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            hint = " (run this where the package is installed)" if reason.startswith("ModuleNotFoundError") else ""
            faults.append(f"{what}: fails: {reason}{hint}")
            continue
        loaded = done.stdout.rpartition("LOADED")[2].split()
        faults += [f"{what}: loads {name}; import it where it is used" for name in LATE if name in loaded]
    return faults


def startup_seconds(root: Path = ROOT, runs: int = 5) -> float:
    """Seconds of `python -m dotllm --help`, the best of `runs`."""
    best = float("inf")
    for _ in range(runs):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "dotllm", "--help"], cwd=root, capture_output=True, check=True)
        best = min(best, time.perf_counter() - begin)
    return best


def main(arguments: list[str] | None = None) -> int:
    """Print the faults of this tree; 1 if there are any."""
    parser = argparse.ArgumentParser(description="Check file and function lengths, imports and what starting loads.")
    parser.add_argument("--time", action="store_true", help="also measure `dotllm --help` (best of 5)")
    options = parser.parse_args(arguments)
    faults = []
    for folder in MEASURED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            faults += length_faults(path.read_text("utf-8"), str(path.relative_to(ROOT)))
    faults += tree_faults()
    faults += startup_faults()
    if options.time and not faults:
        seconds = startup_seconds()
        print(f"dotllm --help: {seconds:.3f} s, best of 5")
        if seconds > HELP_SECONDS:
            faults.append(f"dotllm --help: {seconds:.3f} s; at most {HELP_SECONDS} s")
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
