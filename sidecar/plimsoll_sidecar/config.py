"""The configuration file: read at the start, and again whenever it changes.

A ConfigMap volume is updated by the kubelet with an atomic rename of a directory, so that the file
is always whole. A new file that cannot be used leaves the old configuration in force. The file of a
SupervisionPolicy is the same for all of its pods: what differs is in the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from plimsoll_api import supervisor_config
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervisor_config import POD_ENGINE_ENV, PodEngine, SupervisorConfig, of_pod


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the file and the field."""


class ConfigFile:
    """``error`` says why the newest file is not in use; None when it is."""

    def __init__(self, path: Path) -> None:
        """Read the file; raise :class:`ConfigError`."""
        self._path = path
        self.error: str | None = None
        self.current = _read(path)

    def reread(self) -> bool:
        """Look for a new file. True when ``current`` changed; never raises."""
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
        config = supervisor_config.decode(data)
    except Malformed as error:
        raise ConfigError(f"configuration {path}: {error}") from error
    own = os.environ.get(POD_ENGINE_ENV)
    if not own or config.service.kind != POLICY_KIND:
        return config
    try:
        return of_pod(config, decode(os.fsencode(own), PodEngine))
    except Malformed as error:
        raise ConfigError(f"environment variable {POD_ENGINE_ENV}: {error}") from error
