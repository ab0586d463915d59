"""The configuration file: read at the start, and again whenever it changes.

A ConfigMap volume is updated by the kubelet with an atomic rename of a directory, so that the file
is always whole. A new file that cannot be used leaves the old configuration in force.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from plimsoll_api import supervision
from plimsoll_api.supervision import SupervisorConfig


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the file and the field."""


class ConfigFile:
    """``error`` says why the newest file is not in use; None when it is."""

    def __init__(self, path: Path) -> None:
        """Reads the file; raises :class:`ConfigError`."""
        self._path = path
        self.error: str | None = None
        self.current = _read(path)

    def reread(self) -> bool:
        """Looks for a new file. True when ``current`` changed; never raises."""
        try:
            config = _read(self._path)
        except ConfigError as error:
            self.error = str(error)
            return False
        self.error = None
        changed = config != self.current
        self.current = config
        return changed


def _read(path: Path) -> SupervisorConfig:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror}") from error
    try:
        return supervision.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration {path}: {error}") from error
