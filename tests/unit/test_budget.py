"""The length rules and the start-up rule of tools/budget.py, on made-up files."""

from __future__ import annotations

from pathlib import Path

import budget
import pytest


def function(lines: int, comment: str = "") -> str:
    return f"def f():{comment}\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(("lines", "faults"), [(budget.FILE_LINES, 0), (budget.FILE_LINES + 1, 1)])
def test_file_length(lines: int, faults: int) -> None:
    assert len(budget.length_faults("x = 1\n" * lines, "a.py")) == faults


def test_a_long_file_may_say_why() -> None:
    tail = "x = 1\n" * budget.FILE_LINES
    assert budget.length_faults("# budget: one table, read as a whole\n" + tail, "a.py") == []
    assert len(budget.length_faults("# budget:\n" + tail, "a.py")) == 1
    assert len(budget.length_faults('"""A file."""\n# budget: too late\n' + tail, "a.py")) == 1


@pytest.mark.parametrize(("lines", "faults"), [(budget.FUNCTION_LINES, 0), (budget.FUNCTION_LINES + 1, 1)])
def test_function_length(lines: int, faults: int) -> None:
    assert len(budget.length_faults(function(lines), "a.py")) == faults


def test_a_long_function_is_named_and_may_say_why() -> None:
    (fault,) = budget.length_faults("x = 1\n" + function(61), "dotllm/a.py")
    assert fault.startswith("dotllm/a.py:2: f has 61 lines")
    assert budget.length_faults(function(61, "  # budget: unrolled on purpose"), "a.py") == []


def test_methods_and_nested_functions_count() -> None:
    body = "".join(f"    {line}\n" for line in function(61).splitlines())
    assert len(budget.length_faults("class A:\n" + body, "a.py")) == 1


def tree(root: Path, init: str, main: str) -> Path:
    package = root / "dotllm"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "__main__.py").write_text(main)
    return root


def test_starting_must_not_load_slow_packages(tmp_path: Path) -> None:
    root = tree(tmp_path, "", "import tokenizers\n")
    assert budget.startup_faults(root) == ["dotllm --help: loads tokenizers; import it where it is used"]


def test_starting_must_not_fail(tmp_path: Path) -> None:
    root = tree(tmp_path, "", "raise SystemExit('no such command')\n")
    (fault,) = budget.startup_faults(root)
    assert fault.startswith("dotllm --help: fails:")
    assert "no such command" in fault


def test_a_light_start_is_fine(tmp_path: Path) -> None:
    assert budget.startup_faults(tree(tmp_path, "", "print('usage')\nraise SystemExit(0)\n")) == []
