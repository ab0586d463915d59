"""The source of the detector's modules: what has a name there, and which functions read it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

PACKAGE = "plimsoll_sidecar"
Code = tuple[str, int, str]
"""A function: its file, its line and its name."""


def modules_of(names: Sequence[str]) -> list[ModuleType]:
    """The modules of the names, and those in the packages among them; all of the supervisor's
    detector are imported, so that every user of a constant is found.

    SystemExit for a name without a module.
    """
    for one in pkgutil.walk_packages(
        importlib.import_module(f"{PACKAGE}.detect").__path__, f"{PACKAGE}.detect."
    ):
        importlib.import_module(one.name)
    found: list[ModuleType] = []
    for name in names:
        below = [known for known in sys.modules if known.startswith(f"{name}.")]
        try:
            chosen = [importlib.import_module(each) for each in (name, *sorted(below))]
        except ImportError as error:
            raise SystemExit(f"{name}: no module of that name: {error}") from None
        found += [module for module in chosen if module not in found]
    return found


def code_of(code: CodeType) -> Code:
    return Path(code.co_filename).name, code.co_firstlineno, code.co_name


@cache
def codes() -> tuple[tuple[ModuleType, CodeType], ...]:
    """Every function of ours, with those inside of it; no bodies of modules and classes."""
    return tuple(
        (module, code)
        for module in _loaded()
        for code in _inner(compile(_source(module), str(module.__file__), "exec"))
        if code.co_flags & inspect.CO_OPTIMIZED
    )


def _inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _inner(one)


def _loaded() -> list[ModuleType]:
    names = (PACKAGE, "plimsoll_api")
    return [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in names and getattr(module, "__file__", None)
    ]


@cache
def bindings(module: str, name: str) -> tuple[tuple[ModuleType, str], ...]:
    """Where the constant has a name: in its module, and in those that import it by name."""
    found = [(sys.modules[module], name)]
    for other in _loaded():
        for node in ast.walk(tree_of(other)):
            if isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
                found += [(other, a.asname or a.name) for a in node.names if a.name == name]
    return tuple((holder, alias) for holder, alias in found if alias in vars(holder))


def _source(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()


@cache
def tree_of(module: ModuleType) -> ast.Module:
    return ast.parse(_source(module))


def assigned(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for one in targets:
            names = one.elts if isinstance(one, ast.Tuple) else [one]
            yield from (name.id for name in names if isinstance(name, ast.Name))


def _within(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.FunctionDef) or _rounds(node):
            continue  # a function inside is walked for itself
        yield node
        yield from _within(list(ast.iter_child_nodes(node)))


def _rounds(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "round"
    )


def functions(
    module: ModuleType, tree: ast.Module
) -> Iterator[tuple[str, FunctionType, ast.FunctionDef]]:
    for path, node in _defined(tree.body, ""):
        function = resolved(module, path)
        if function is not None:
            yield path, function, node


def _defined(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{prefix}{node.name}.")


def resolved(module: ModuleType, path: str) -> FunctionType | None:
    """The plain function below decorators; None where there is none."""
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else getattr(found, "fget", None)
    return found if isinstance(found, FunctionType) else None


def defaults(
    function: FunctionType, node: ast.FunctionDef
) -> Iterator[tuple[str, ast.expr, str | int]]:
    """Name, expression and place of each default: an index, or the name of a keyword argument."""
    placed = [*node.args.posonlyargs, *node.args.args]
    given = placed[len(placed) - len(node.args.defaults) :]
    for index, (one, value) in enumerate(zip(given, node.args.defaults, strict=True)):
        if index < len(function.__defaults__ or ()):
            yield one.arg, value, index
    for one, maybe in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if maybe is not None and one.arg in (function.__kwdefaults__ or {}):
            yield one.arg, maybe, one.arg


def unnamed(module: ModuleType) -> list[str]:
    """Numbers inside of functions, which cannot be moved: ``line 12: 0.25``.

    Without 0, 1 and 2, and the digits of a rounding.
    """
    found: set[tuple[int, float]] = set()
    for function in (n for n in ast.walk(tree_of(module)) if isinstance(n, ast.FunctionDef)):
        for node in _within(function.body):
            if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
                continue
            if isinstance(node.value, (int, float)) and node.value not in (0, 1, 2):
                found.add((node.lineno, node.value))
    return [f"line {line}: {value}" for line, value in sorted(found)]
