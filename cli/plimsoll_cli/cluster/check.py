"""One line of ``plimsoll doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """``ok`` is None for what could not be found out."""

    name: str
    ok: bool | None
    text: str
