"""Load injected faults from the package ``plimsoll_faults``, for tests and demonstrations."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from plimsoll_engine.errors import SettingsError

ENTRY_POINT_GROUP = "plimsoll_engine.faults"


def check_faults(faults: str) -> None:
    """Check ``faults``, the value of ``PLIMSOLL_INJECT``. Raises SettingsError."""
    if faults:
        load_entry_point("check")(faults)


def load_entry_point(name: str) -> Any:
    """Return the entry point ``name`` of ``plimsoll_faults``. Raises SettingsError."""
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry.load()
    raise SettingsError(
        "PLIMSOLL_INJECT requires the package plimsoll-faults, which is not installed: use "
        "an image with the package, or unset the variable"
    )
