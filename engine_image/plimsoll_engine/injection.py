"""Load injected faults from the package ``plimsoll_faults``, for tests and demonstrations.

The engine itself contains no faults. If ``PLIMSOLL_INJECT`` is set, each process loads its part of
the package by an entry point.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from plimsoll_engine.errors import SettingsError

ENTRY_POINT_GROUP = "plimsoll_engine.faults"


def check_faults(faults: str) -> None:
    """Check ``faults``, the value of ``PLIMSOLL_INJECT``. An empty value is valid.

    Raises SettingsError if a fault is unknown or the package is not installed.
    """
    if faults:
        load_entry_point("check")(faults)


def load_entry_point(name: str) -> Any:
    """Return the object that the entry point ``name`` refers to.

    Raises SettingsError if the package ``plimsoll_faults`` is not installed.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry.load()
    raise SettingsError(
        "PLIMSOLL_INJECT requires the package plimsoll-faults, which is not installed: use "
        "an image with the package, or unset the variable"
    )
