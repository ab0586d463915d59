"""The numeric constants of the detector's modules, and how to move one of them alone.

A constant is a number with a name: an attribute of a module, an element of a tuple, a value of a
dictionary, a field of a struct that a module holds, or a default argument. Modules that import it
by name get the moved value too. What is computed from a constant while modules are imported keeps
its value: it is a constant of its own.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from bench.constants_source import (
    Code,
    assigned,
    bindings,
    code_of,
    codes,
    defaults,
    functions,
    resolved,
    tree_of,
)


@dataclass(frozen=True)
class Constant:
    """``steps`` lead from the module's attribute to the number: an index, a key or a field.

    ``function`` is the function's path within the module where this is a default argument.
    """

    module: str
    name: str
    value: float | int
    steps: tuple[Any, ...] = ()
    function: str | None = None

    @property
    def label(self) -> str:
        """How it is called: ``LIMITS[1]``, ``THRESHOLDS.odds``, ``fit(min_points)``."""
        name = self.name if self.function is None else f"{self.function}({self.name})"
        return name + "".join(
            f".{step}" if isinstance(step, str) and step.isidentifier() else f"[{step!r}]"
            for step in self.steps
        )


def constants_of(module: ModuleType) -> Iterator[Constant]:
    """The numbers with a name that ``module`` itself defines, in the order of its source."""
    tree = tree_of(module)
    for name in assigned(tree):
        if hasattr(module, name):
            for steps, value in _numbers(getattr(module, name)):
                yield Constant(module.__name__, name, value, steps)
    for path, function, node in functions(module, tree):
        for argument, default, _ in defaults(function, node):
            if not isinstance(default, ast.Name):
                yield from _default(module, path, argument, function)


def _default(
    module: ModuleType, path: str, argument: str, function: FunctionType
) -> Iterator[Constant]:
    value = inspect.signature(function).parameters[argument].default
    for steps, number in _numbers(value):
        yield Constant(module.__name__, argument, number, steps, path)


def target(constant: Constant, factor: float) -> float | int | None:
    """The moved value, rounded for an integer; None where that is no other value."""
    if not math.isfinite(constant.value):
        return None
    if isinstance(constant.value, int):
        moved: float | int = round(constant.value * factor)
    else:
        moved = float(f"{constant.value * factor:.12g}")
    return None if moved == constant.value else moved


def stuck(constant: Constant) -> str | None:
    """Why the constant cannot be moved; None where it can be."""
    if constant.value == 0 or not math.isfinite(constant.value):
        return f"no share of {constant.value} is another number"
    if not users(constant):
        return "no function reads it: it only enters what is computed on import"
    return None


@contextmanager
def moved(constant: Constant, value: float | int) -> Iterator[None]:
    """While this lasts, the constant alone has another value in this process."""
    undo: list[Callable[[], None]] = []
    try:
        if constant.function is not None:
            _move_default(constant, value, undo)
        else:
            root = _root(constant)
            _bind_everywhere(constant, root, _rebuilt(root, constant.steps, value), undo)
        yield
    finally:
        for step in reversed(undo):
            step()


def users(constant: Constant) -> frozenset[Code]:
    """The functions that read the constant, by name: all others do the same without it."""
    module = sys.modules[constant.module]
    if constant.function is not None and not constant.steps:
        function = resolved(module, constant.function)
        return frozenset() if function is None else frozenset({code_of(function.__code__)})
    root = _root(constant)
    # A field is read where its own name stands, whatever the struct is called there.
    names = {str(constant.steps[0])} if constant.steps and _fields(root) else {constant.name}
    if not _fields(root):
        names |= {name for _, name in bindings(constant.module, constant.name)}
    return frozenset(code_of(code) for _, code in codes() if names & set(code.co_names))


# ---- values


def _root(constant: Constant) -> Any:
    """What the number is a part of, or the number."""
    module = sys.modules[constant.module]
    if constant.function is None:
        return getattr(module, constant.name)
    function = resolved(module, constant.function)
    assert function is not None
    return inspect.signature(function).parameters[constant.name].default


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and type(value) in (int, float)


def _numbers(value: Any) -> Iterator[tuple[tuple[Any, ...], float | int]]:
    if _number(value):
        yield (), value
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        yield from _below(enumerate(value))
    elif isinstance(value, dict):
        yield from _below(value.items())
    elif not isinstance(value, type):
        yield from _below((name, getattr(value, name)) for name in _fields(value))


def _below(items: Any) -> Iterator[tuple[tuple[Any, ...], float | int]]:
    for step, item in items:
        yield from (((step, *steps), number) for steps, number in _numbers(item))


def _fields(value: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    return getattr(value, "_fields", ())


def _rebuilt(value: Any, steps: tuple[Any, ...], number: float | int) -> Any:
    if not steps:
        return number
    first, rest = steps[0], steps[1:]
    if isinstance(value, dict):
        return value | {first: _rebuilt(value[first], rest, number)}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return (*value[:first], _rebuilt(value[first], rest, number), *value[first + 1 :])
    changed = {first: _rebuilt(getattr(value, first), rest, number)}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **changed)
    return value._replace(**changed)


# ---- who reads it


def _bind_everywhere(
    constant: Constant, old: Any, new: Any, undo: list[Callable[[], None]]
) -> None:
    bound = bindings(constant.module, constant.name)
    for module, name in bound:
        undo.append(partial(setattr, module, name, old))
        setattr(module, name, new)
        for _, function, node in functions(module, tree_of(module)):
            for _, default, place in defaults(function, node):
                if isinstance(default, ast.Name) and default.id == name:
                    _set_default(function, place, new, undo)


def _move_default(constant: Constant, value: float | int, undo: list[Callable[[], None]]) -> None:
    module = sys.modules[constant.module]
    for path, function, node in functions(module, tree_of(module)):
        if path == constant.function:
            for argument, _, place in defaults(function, node):
                if argument == constant.name:
                    _set_default(
                        function, place, _rebuilt(_root(constant), constant.steps, value), undo
                    )


def _set_default(
    function: FunctionType, place: str | int, value: Any, undo: list[Callable[[], None]]
) -> None:
    placed, keywords = function.__defaults__, function.__kwdefaults__

    def back() -> None:
        function.__defaults__, function.__kwdefaults__ = placed, keywords

    undo.append(back)
    if isinstance(place, str):
        function.__kwdefaults__ = {**(keywords or {}), place: value}
    else:
        before = placed or ()
        function.__defaults__ = (*before[:place], value, *before[place + 1 :])
