"""Where a local replica keeps its files when no ``--run-dir`` is given."""

from __future__ import annotations

import os
from pathlib import Path


def base() -> Path:
    """``$XDG_STATE_HOME/plimsoll``, by default ``~/.local/state/plimsoll``."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "plimsoll"


def of(service: str) -> Path:
    """Return the directory of the service of that name."""
    return base() / service
