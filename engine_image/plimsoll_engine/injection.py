"""Load injected faults from the package ``plimsoll_faults``, for tests and demonstrations.

The engine itself contains no faults. If ``PLIMSOLL_INJECT`` is set, each process loads its part of
the package through an entry point.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from plimsoll_engine.errors import SettingsError

GROUP = "plimsoll_engine.faults"


def check(text: str) -> None:
    """Raise SettingsError if ``text`` is not a list of faults or the package is not installed."""
    if text:
        load("check")(text)


def load(name: str) -> Any:
    """Return the entry point ``name``. Raises SettingsError if the package is not installed."""
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise SettingsError(
        "PLIMSOLL_INJECT: the package plimsoll-faults is not installed: use an image or an "
        "environment that has it, or unset the variable"
    )
