"""Docstrings of the product say what is there: names that they give exist, and so does a result."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sidecar/plimsoll_sidecar", "crds/plimsoll_api")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?([\w.]+)`")
QUOTED = re.compile(r"``([a-z_][a-z0-9_]*)``")
FILE = re.compile(r"``([\w/]+\.py)``")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text


def words(tree: ast.Module) -> set[str]:
    """Every word of the code: names, arguments, attributes, and texts that are no docstrings."""
    docstrings = {id(node.body[0].value) for node, _ in documented(tree)}  # type: ignore[attr-defined]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found |= set((node.asname or node.name).split("."))
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            found |= set(re.findall(r"\w+", str(node.value)))
    return found


def parts(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    """Words of the modules of ours that this one imports, and of the contracts."""
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return CONTRACTS.union(*(WORDS[name] for name in names & WORDS.keys()))


def exists(name: str) -> bool:
    """Whether a role's target is there: a module of ours, a name of it, or a name of any."""
    owner, _, last = name.rpartition(".")
    modules = [module for module in WORDS if module in (name, owner, owner.rpartition(".")[0])]
    if name.startswith("plimsoll"):
        return name in modules or any(last in WORDS[module] for module in modules)
    return any(last in found for found in WORDS.values())


def named(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")


WORDS = {named(path): words(parts(path)) for path in MODULES}
CONTRACTS = set().union(*(found for name, found in WORDS.items() if "plimsoll_api" in name))
FILES = "".join(f"/{path.relative_to(ROOT)}\n" for path in ROOT.glob("[a-z]*/**/*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_docstrings_exist(path: Path) -> None:
    tree = parts(path)
    known = words(tree) | imported(tree)
    wrong = []
    for node, text in documented(tree):
        where = getattr(node, "name", "the module")
        wrong += [f"{where}: {name}" for name in ROLE.findall(text) if not exists(name)]
        wrong += [f"{where}: {one}" for one in FILE.findall(text) if f"/{one}\n" not in FILES]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            wrong += [f"{where}: {name}" for name in QUOTED.findall(text) if name not in known]
    assert wrong == [], "no such name"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_returns_nothing_does_not_say_that_it_returns(path: Path) -> None:
    wrong = [
        node.name
        for node, text in documented(parts(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.returns, ast.Constant)
        and node.returns.value is None
        and re.match(r"Returns?\b(?! early)", text)
    ]
    assert wrong == []
