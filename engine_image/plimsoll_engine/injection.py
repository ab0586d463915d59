"""Load the faults that a test or a demonstration switches on: the package ``plimsoll_faults``.

The engine knows no fault. Where ``PLIMSOLL_INJECT`` is set, each process loads its own part of the
package by an entry point.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from plimsoll_engine.errors import SettingsError

GROUP = "plimsoll_engine.faults"


def check(text: str) -> None:
    """Raise SettingsError where ``text`` is no list of faults, or no package of faults is there."""
    if text:
        load("check")(text)


def load(name: str) -> Any:
    """Return what the package offers under ``name``; SettingsError where it is not installed."""
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise SettingsError(
        "PLIMSOLL_INJECT: the package plimsoll-faults is not installed: use an image or an "
        "environment that has it, or unset the variable"
    )
