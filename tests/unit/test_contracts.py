"""A contract stands once: no part defines a class or a constant of ``plimsoll_api`` again."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from plimsoll_api import names

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("operator", "sidecar", "engine_image", "cli", "faults")
CONTRACTS = sorted((ROOT / "crds" / "plimsoll_api").glob("*.py"))
LITERALS = {
    value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)
} - {names.CRD_VERSION, names.OPERATOR_NAME, names.ENGINE_CONTAINER, names.SUPERVISOR_CONTAINER}
LITERALS -= set(names.UNREADY_REASONS)
"""Texts that only the contract writes. The operator's name is also that of its program, and two
reasons to be unready are also names of actions."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def sources() -> list[Path]:
    return [path for part in PARTS for path in sorted((ROOT / part).glob("*/**/*.py"))]


def classes(path: Path) -> list[str]:
    return [node.name for node in parsed(path).body if isinstance(node, ast.ClassDef)]


def constants(path: Path) -> Iterator[tuple[str, object]]:
    """Names and values that the module assigns at its top; a value that is no literal is None."""
    for node in parsed(path).body:
        targets: Sequence[ast.expr]
        match node:
            case ast.Assign():
                targets, value = node.targets, node.value
            case ast.AnnAssign(value=ast.expr() as value):
                targets = [node.target]
            case _:
                continue
        literal = value.value if isinstance(value, ast.Constant) else None
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Name):
                    yield name.id, literal


def shared(names_of: Callable[[Path], Iterable[str]]) -> list[str]:
    """Public names that the contracts define, each as often as contracts and parts define it."""
    everywhere = [name for path in [*CONTRACTS, *sources()] for name in names_of(path)]
    contract = {name for path in CONTRACTS for name in names_of(path) if name[0] != "_"}
    return [name for name in everywhere if name in contract]


def twice(found: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(found).items() if count > 1]


def test_the_parts_are_there() -> None:
    assert len(sources()) > 200
    assert names.TOKEN_FILE in LITERALS
    assert names.API_GROUP in LITERALS


def test_a_class_of_the_contracts_is_defined_once() -> None:
    found = shared(classes)
    assert len(found) > 100
    assert twice(found) == []


def test_a_constant_of_the_contracts_is_defined_once() -> None:
    found = shared(lambda path: (name for name, _ in constants(path) if name.isupper()))
    assert len(found) > 40
    assert twice(found) == []


def test_no_part_writes_a_text_of_the_contract_again() -> None:
    again = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in [
            *sources(),
            *ROOT.glob("research/bench/*.py"),
            *ROOT.glob("research/leaklab/*.py"),
        ]
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value in LITERALS
    ]
    assert again == []


def test_phases_are_compared_by_the_contract() -> None:
    """A set of the ended phases, written out, is a copy of ``incidents.ENDED``."""
    ended = {"Resolved", "Unresolved", "Suppressed"}
    again = []
    for path in sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Set | ast.Tuple | ast.List):
                values = {part.value for part in node.elts if isinstance(part, ast.Constant)}
                if values == ended:
                    again.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert again == []


def test_times_are_written_by_the_contract() -> None:
    again = [
        str(path.relative_to(ROOT))
        for path in sources()
        if '"%Y-%m-%dT%H:%M:%S' in path.read_text()
    ]
    assert again == []
