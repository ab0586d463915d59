"""Read the configuration file at the start and whenever it changes.

If a new file is invalid, the previous configuration stays in force. Without a file, for example
after the deletion of a policy, the supervisor only observes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from plimsoll_api import supervisor_config
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.engines import EngineType
from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervision import Mode
from plimsoll_api.supervisor_config import (
    GROUP_ENV,
    POD_ENGINE_ENV,
    EngineEndpoint,
    GroupMember,
    PodEngine,
    ServiceRef,
    SupervisorConfig,
    make_member_config,
    make_pod_config,
)

log = logging.getLogger(__name__)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)

# The default port of an InferenceService, of vLLM and of most other servers.
DEFAULT_ENGINE_URL = "http://127.0.0.1:8000"


class ConfigError(ValueError):
    """An invalid configuration. The message names the file and the field."""


class MissingConfigError(ConfigError):
    """A configuration file that does not exist."""


class ConfigFile:
    """Configuration in force, and the state of its file.

    Attributes:
        current: The configuration in force.
        error: The reason why the newest file is not in use; None if it is in use.
        is_missing: Whether there is no file. The mode is then Observe.

    """

    def __init__(self, path: Path) -> None:
        """Read the file. Outside a pod, raise :class:`ConfigError` if it is missing or invalid."""
        self._path = path
        self.error: str | None = None
        self.is_missing = False
        try:
            self.current = _read_config_file(path)
        except ConfigError as error:
            pod = os.environ.get("POD_NAME")
            if pod is None:
                raise
            self.is_missing = True
            self.current = _make_default_config(pod)
            self._set_error(error)

    def reload(self) -> bool:
        """Read the file again, and return whether ``current`` has changed."""
        try:
            config = _read_config_file(self._path)
        except MissingConfigError as error:
            self.is_missing = True
            config = _set_observe_mode(self.current)
            self._set_error(error)
        except ConfigError as error:
            self._set_error(error)
            return False
        else:
            self.error, self.is_missing = None, False
        changed = config != self.current
        self.current = config
        return changed

    def _set_error(self, error: ConfigError) -> None:
        text = f"{error}; the supervisor continues with the previous configuration"
        if self.is_missing:
            text = f"the supervisor only observes, because it has no configuration: {error}"
        if text != self.error:
            log.error("%s", text)
        self.error = text


def _read_config_file(path: Path) -> SupervisorConfig:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise MissingConfigError(
            f"cannot read the configuration {path}: {error.strerror}"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    try:
        config = supervisor_config.decode_config(data)
    except MalformedError as error:
        raise ConfigError(f"the configuration {path} is invalid: {error}") from error
    if config.service.kind == POLICY_KIND:
        own = _read_variable(POD_ENGINE_ENV, PodEngine)
        return make_pod_config(config, own) if own is not None else config
    member = _read_variable(GROUP_ENV, GroupMember)
    return make_member_config(config, member) if member is not None else config


def _read_variable(name: str, settings_type: type[_Struct]) -> _Struct | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return decode(os.fsencode(text), settings_type)
    except MalformedError as error:
        raise ConfigError(f"the environment variable {name} is invalid: {error}") from error


def _make_default_config(pod: str) -> SupervisorConfig:
    # This supervisor only observes. Because its service has no UID, it publishes nothing and takes
    # no restart slot.
    try:
        own = _read_variable(POD_ENGINE_ENV, PodEngine)
    except ConfigError:
        own = None
    if own is None:
        own = PodEngine(EngineEndpoint(EngineType.CUSTOM, DEFAULT_ENGINE_URL, DEFAULT_ENGINE_URL))
    service = ServiceRef(pod, os.environ.get("POD_NAMESPACE", "default"))
    return _set_observe_mode(make_pod_config(SupervisorConfig(service, own.engine), own))


def _set_observe_mode(config: SupervisorConfig) -> SupervisorConfig:
    return replace(config, supervision=replace(config.supervision, mode=Mode.OBSERVE))
