"""The configuration file: read at the start, and again whenever it changes.

The kubelet updates a ConfigMap volume with an atomic rename of a directory, so the file is always
whole. If a new file cannot be used, the old configuration stays in force. Without a file, for
example after the deletion of a policy, the supervisor only watches. All pods of a SupervisionPolicy
have the same file; what differs between them is in the environment.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from msgspec.structs import replace

from plimsoll_api import supervisor_config
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.engines import EngineType
from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervision import Mode
from plimsoll_api.supervisor_config import (
    POD_ENGINE_ENV,
    EngineEndpoint,
    PodEngine,
    ServiceRef,
    SupervisorConfig,
    of_pod,
)

log = logging.getLogger(__name__)

UNKNOWN_URL = "http://127.0.0.1:8000"
"""Port of an engine that neither a file nor the environment describes: the default of an
InferenceService, of vLLM and of most other servers."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the file and the field."""


class MissingConfig(ConfigError):
    """There is no configuration file."""


class ConfigFile:
    """``error`` says why the newest file is not in use; None when it is.

    ``missing`` says that there is no file: then the mode is Observe.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. In a pod, one that cannot be used counts as missing.

        Raises :class:`ConfigError` outside of a pod.
        """
        self._path = path
        self.error: str | None = None
        self.missing = False
        try:
            self.current = _read(path)
        except ConfigError as error:
            pod = os.environ.get("POD_NAME")
            if pod is None:
                raise
            self.missing = True
            self.current = _without_file(pod)
            self._failed(error)

    def reread(self) -> bool:
        """Look for a new file. True when ``current`` changed; never raises."""
        try:
            config = _read(self._path)
        except MissingConfig as error:
            self.missing = True
            config = _watching(self.current)
            self._failed(error)
        except ConfigError as error:
            self._failed(error)
            return False
        else:
            self.error, self.missing = None, False
        changed = config != self.current
        self.current = config
        return changed

    def _failed(self, error: ConfigError) -> None:
        """Keep what an error means for the supervisor, and log it once."""
        text = f"{error}; the previous configuration stays in force"
        if self.missing:
            text = f"no configuration, the supervisor only watches: {error}"
        if text != self.error:
            log.error("%s", text)
        self.error = text


def _read(path: Path) -> SupervisorConfig:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise MissingConfig(f"configuration {path}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror}") from error
    try:
        config = supervisor_config.decode(data)
    except Malformed as error:
        raise ConfigError(f"configuration {path}: {error}") from error
    own = _pod_engine() if config.service.kind == POLICY_KIND else None
    return of_pod(config, own) if own is not None else config


def _pod_engine() -> PodEngine | None:
    """Return what admission found in this pod; None without it. Raises ConfigError."""
    own = os.environ.get(POD_ENGINE_ENV)
    if not own:
        return None
    try:
        return decode(os.fsencode(own), PodEngine)
    except Malformed as error:
        raise ConfigError(f"environment variable {POD_ENGINE_ENV}: {error}") from error


def _without_file(pod: str) -> SupervisorConfig:
    """Return the configuration of a supervisor that starts without a file in ``pod``: it watches.

    The service has no UID, so nothing is published and no restart slot is taken.
    """
    try:
        own = _pod_engine()
    except ConfigError:
        own = None
    if own is None:
        own = PodEngine(EngineEndpoint(EngineType.CUSTOM, UNKNOWN_URL, UNKNOWN_URL))
    service = ServiceRef(pod, os.environ.get("POD_NAMESPACE", "default"))
    return _watching(of_pod(SupervisorConfig(service, own.engine), own))


def _watching(config: SupervisorConfig) -> SupervisorConfig:
    return replace(config, supervision=replace(config.supervision, mode=Mode.OBSERVE))
