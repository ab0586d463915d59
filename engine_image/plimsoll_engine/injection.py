"""Load injected faults from the package ``plimsoll_faults``, for tests and demonstrations.

The engine itself contains no faults. If ``PLIMSOLL_INJECT`` is set, each process loads its part of
the package through an entry point.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from plimsoll_engine.errors import SettingsError

ENTRY_POINT_GROUP = "plimsoll_engine.faults"


def check_faults(text: str) -> None:
    """Raise SettingsError if ``text`` is no list of faults or the package is not installed."""
    if text:
        load_entry_point("check")(text)


def load_entry_point(name: str) -> Any:
    """Return the object that the entry point ``name`` refers to.

    Raises SettingsError if the package is not installed.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry.load()
    raise SettingsError(
        "PLIMSOLL_INJECT: the package plimsoll-faults is not installed: use an image with it, or "
        "unset the variable"
    )
