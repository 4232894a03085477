"""What a package promises from outside: names, version, licence, links, and one bundled model."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import dotllm

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(dotllm.__file__).parent
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__main__.py")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def top_level_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_lists_what_it_offers(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    if not any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign) for node in tree.body):
        return  # a package that only names its part of the tree
    listed = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]
    ]
    assert len(listed) == 1, "no __all__"
    names = ast.literal_eval(listed[0])
    assert len(set(names)) == len(names)
    assert set(names) <= top_level_names(tree)


def test_every_module_says_what_it_is_for() -> None:
    silent = [p.name for p in PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(p.read_text("utf-8")))]
    assert silent == []


def test_version_and_typing_marker() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab]\d+|rc\d+|\.dev\d+)?", dotllm.__version__)
    assert (PACKAGE / "py.typed").exists()


def test_the_bundled_model_is_a_gguf_file() -> None:
    with (PACKAGE / "data" / "story-q8_0.gguf").open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_the_licence_is_the_one_that_the_metadata_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert text.rstrip().endswith("limitations under the License.")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    inside = [link for link in links if not link.startswith(("http:", "https:", "mailto:"))]
    missing = [link for link in inside if not (page.parent / link).exists()]
    assert missing == []


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    assert re.search(r"^## \[Unreleased\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
