"""The configuration file, read at the start and whenever it changes.

The kubelet updates a ConfigMap volume with an atomic rename of a directory, so the file is always
complete. If a new file is invalid, the previous configuration stays in force. Without a file, for
example after the deletion of a policy, the supervisor only observes. All pods of a
SupervisionPolicy have the same file; what differs between them is in the environment.
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
"""URL of an engine that neither a file nor the environment describes. The port is the default of an
InferenceService, of vLLM and of most other servers."""


class ConfigError(ValueError):
    """The configuration is invalid; the message names the file and the field."""


class MissingConfig(ConfigError):
    """There is no configuration file."""


class ConfigFile:
    """The configuration in force.

    ``error`` is why the newest file is not in use, None if it is. ``missing`` is whether there is
    no file; then the mode is Observe.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. In a pod, an invalid file counts as missing.

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
            self.current = _default_config(pod)
            self._set_error(error)

    def reload(self) -> bool:
        """Read the file again; return whether ``current`` changed. Never raises."""
        try:
            config = _read(self._path)
        except MissingConfig as error:
            self.missing = True
            config = _observe_only(self.current)
            self._set_error(error)
        except ConfigError as error:
            self._set_error(error)
            return False
        else:
            self.error, self.missing = None, False
        changed = config != self.current
        self.current = config
        return changed

    def _set_error(self, error: ConfigError) -> None:
        """Store the error and its effect, and log it once."""
        text = f"{error}; the previous configuration stays in force"
        if self.missing:
            text = f"no configuration, so the supervisor only observes: {error}"
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
    """Return what the webhook found in this pod; None without it. Raises ConfigError."""
    own = os.environ.get(POD_ENGINE_ENV)
    if not own:
        return None
    try:
        return decode(os.fsencode(own), PodEngine)
    except Malformed as error:
        raise ConfigError(f"environment variable {POD_ENGINE_ENV}: {error}") from error


def _default_config(pod: str) -> SupervisorConfig:
    """Return the configuration of a supervisor that starts without a file: it only observes.

    The service has no UID, so nothing is published and no restart slot is taken.
    """
    try:
        own = _pod_engine()
    except ConfigError:
        own = None
    if own is None:
        own = PodEngine(EngineEndpoint(EngineType.CUSTOM, UNKNOWN_URL, UNKNOWN_URL))
    service = ServiceRef(pod, os.environ.get("POD_NAMESPACE", "default"))
    return _observe_only(of_pod(SupervisorConfig(service, own.engine), own))


def _observe_only(config: SupervisorConfig) -> SupervisorConfig:
    return replace(config, supervision=replace(config.supervision, mode=Mode.OBSERVE))
