"""The files of a local replica, and calls of its supervisor, as by ``kubectl exec`` in a pod."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.names import ASK_MODULE
from plimsoll_api.supervisor_config import CONFIG_FILE
from plimsoll_cli.errors import RunError, UsageError


def base() -> Path:
    """``$XDG_STATE_HOME/plimsoll``, by default ``~/.local/state/plimsoll``."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "plimsoll"


def of(service: str) -> Path:
    """Return the directory of the service of that name."""
    return base() / service


def in_supervisor(folder: Path) -> Callable[[list[str], float], tuple[int, str, str]]:
    """Return a function that runs the supervisor's ``ask`` program on the run in ``folder``.

    It returns exit status, output and error. Raises UsageError if no service ran there; the
    function raises RunError if no answer comes in time.
    """
    config = folder / "etc" / CONFIG_FILE
    if not config.is_file():
        raise UsageError(f"{config}: there is no such file: does the service run here?")
    files = [f"--config={config}", f"--run-dir={folder / 'run'}", f"--state-dir={folder / 'state'}"]

    def reach(arguments: list[str], limit_s: float) -> tuple[int, str, str]:
        command = [sys.executable, "-m", ASK_MODULE, *arguments, *files]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{folder}: no answer within {limit_s:.0f} s") from None
        return done.returncode, done.stdout, done.stderr

    return reach
