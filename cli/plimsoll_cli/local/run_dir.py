"""Directories of local replicas, and calls to their supervisors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.names import ASK_MODULE
from plimsoll_api.supervisor_config import CONFIG_FILE
from plimsoll_cli.errors import RunError, UsageError


def get_base_dir() -> Path:
    """Return ``$XDG_STATE_HOME/plimsoll``, by default ``~/.local/state/plimsoll``."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "plimsoll"


def get_service_dir(service: str) -> Path:
    """Return the directory of a service."""
    return get_base_dir() / service


def make_supervisor_caller(folder: Path) -> Callable[[list[str], float], tuple[int, str, str]]:
    """Return a function that runs the ``ask`` program for the supervisor in ``folder``.

    The function raises RunError after a timeout. Raises UsageError if no service ran there.
    """
    config = folder / "etc" / CONFIG_FILE
    if not config.is_file():
        raise UsageError(f"{config} does not exist: check that the service runs on this machine")
    files = [f"--config={config}", f"--run-dir={folder / 'run'}", f"--state-dir={folder / 'state'}"]

    def run_ask(arguments: list[str], timeout_s: float) -> tuple[int, str, str]:
        command = [sys.executable, "-m", ASK_MODULE, *arguments, *files]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the supervisor of {folder} did not answer within {timeout_s:.0f} s"
            ) from None
        return done.returncode, done.stdout, done.stderr

    return run_ask
