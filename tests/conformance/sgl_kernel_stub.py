"""A package ``sgl_kernel`` without kernels, so that SGLang starts on a CPU that has no build of it.

Every name and submodule can be imported; whatever is called raises.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any, NoReturn

__version__ = "0.4.10"
_PACKAGE = "sgl_kernel"


class Absent:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{self._name}: this machine has no kernels of SGLang")

    def __getattr__(self, name: str) -> Absent:
        return _absent(f"{self._name}.{name}")


def _absent(name: str) -> Absent:
    # Dunder names are asked for to find out what a module can do: it can do nothing.
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return Absent(name)


def __getattr__(name: str) -> Absent:
    return _absent(name)


class _Finder:
    """Makes an empty module of every submodule."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{_PACKAGE}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _absent  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.append(_Finder())
