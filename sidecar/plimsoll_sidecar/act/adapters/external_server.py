"""Identify an external engine's server: its type, version, routes and arguments.

They are read once per epoch. OPTIONS requests, which have no effect, find the routes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time

import msgspec

from plimsoll_api.admin import Capability
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.external_profile import ENGINE_PROFILES, EngineProfile
from plimsoll_sidecar.act.adapters.kv_transfer import read_connector_name, read_kv_lease_s
from plimsoll_sidecar.act.adapters.processes import OwnedProcesses
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.engine_processes import is_engine_command
from plimsoll_sidecar.signals.process_table import read_command_line, read_environment_variable

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 3.0
IDENTIFY_TIMEOUT_S = 2.0
RETRY_INTERVAL_S = 30.0
# All spellings of a metrics line with an engine's prefix.
_METRIC_PREFIX_PATTERN = rb'^(?:\{")?(?:ray_)?%s[:_]'


class ServerInfo:
    """Information about the server of an external engine.

    Attributes:
        version: The version that the server reports, or else the configured version.
        routes: The routes in the engine's profile that the server has.
        kv_lease_s: The longest time for which the server holds KV blocks for another engine; None
            if it holds none.
        connector: The name of its KV connector; empty without a connector.

    """

    def __init__(self, endpoint: EngineEndpoint, server: HttpClient, owned: OwnedProcesses) -> None:
        self._endpoint, self._profile = endpoint, ENGINE_PROFILES[endpoint.type]
        self._server, self._owned = server, owned
        self._mismatch = ""
        self.version = endpoint.version
        self.reset()

    def reset(self) -> None:
        """Discard all information about the previous process except its version."""
        self.routes: frozenset[str] = frozenset()
        self.kv_lease_s: float | None = None
        self.connector = ""
        self._next_routes_at = self._next_version_at = 0.0

    def update(self) -> None:
        """Read the routes, the arguments and the version of a serving engine, once per epoch."""
        if not self._next_routes_at:
            self._update_kv_transfer_settings()
        self._update_routes()
        self._update_version()

    @property
    def has_silent_route(self) -> bool:
        """Whether the server was asked for its routes, but has not answered for all of them."""
        return 0.0 < self._next_routes_at < math.inf

    @property
    def capabilities(self) -> list[Capability]:
        """Capabilities of the engine: drain, restart, and trim if the server supports it."""
        capabilities = [Capability.DRAIN, Capability.RESTART_ENGINE]
        if any(path in self.routes for path in self._profile.trim_paths):
            capabilities.insert(0, Capability.TRIM)
        return capabilities

    def verify_type(self) -> None:
        """Raise EngineError if the server is not of the configured engine type."""
        configured_type = self._endpoint.type
        if configured_type is EngineType.CUSTOM:
            return
        port = self._endpoint.serving_port
        engine_type = identify_engine_type(self._server)
        trouble = ""
        if engine_type is not None and engine_type is not configured_type:
            trouble = (
                f"the server on port {port} is {engine_type.value}, but the supervisor is "
                f"configured for {configured_type.value}: correct the engine type or the port"
            )
        elif engine_type is None and not self._is_expected_program():
            trouble = (
                f"the server on port {port} does not identify itself as {configured_type.value}: "
                "check the engine type and the port"
            )
        if trouble and trouble != self._mismatch:
            log.warning("cannot find the engine: %s", trouble)
        self._mismatch = trouble
        if trouble:
            raise EngineError(trouble)

    def _is_expected_program(self) -> bool:
        members = self._owned.find_processes_or_none()
        if members is None:  # the process has ended since it answered
            return False
        if members.container is not None:
            return True
        return members.main is not None and is_engine_command(
            read_command_line(members.main.pid), self._endpoint.type
        )

    def _update_version(self) -> None:
        # A failure is retried: SGLang asks its scheduler for the version, which may be too busy to
        # answer.
        now = time.monotonic()
        if now < self._next_version_at:
            return
        version = read_server_version(self._server, self._profile)
        self.version = version or self.version
        self._next_version_at = math.inf if version else now + RETRY_INTERVAL_S

    def _update_kv_transfer_settings(self) -> None:
        members = self._owned.find_processes_or_none()
        if members is None or members.main is None:
            return
        pid, kind = members.main.pid, self._endpoint.type
        words = read_command_line(pid)
        self.connector = read_connector_name(kind, words)
        self.kv_lease_s = read_kv_lease_s(
            kind, words, lambda name: read_environment_variable(pid, name)
        )

    def _update_routes(self) -> None:
        # Ask again if the server is too busy to answer: without its routes, a paused engine could
        # not be resumed.
        now = time.monotonic()
        if now < self._next_routes_at:
            return
        paths = (*self._profile.trim_paths, self._profile.pause_path, self._profile.resume_path)
        self._next_routes_at = now + RETRY_INTERVAL_S
        with contextlib.suppress(EngineError):
            # 405 if the route exists for another method, 404 if it does not exist.
            self.routes = frozenset(
                path
                for path in filter(None, paths)
                if self._server.call("OPTIONS", path.partition("?")[0], REQUEST_TIMEOUT_S)[0] == 405
            )
            self._next_routes_at = math.inf


class _Model(msgspec.Struct):
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str = ""


def identify_engine_type(server: HttpClient) -> EngineType | None:
    """Return the engine type from the server's metrics or models; None if unknown."""
    page = _fetch(server, "/metrics") or b""
    for kind, profile in ENGINE_PROFILES.items():
        if profile.metric_prefix and re.search(
            _METRIC_PREFIX_PATTERN % profile.metric_prefix.encode(), page, re.M
        ):
            return kind
    try:
        models = decode(_fetch(server, "/v1/models") or b"{}", _Models).data
    except MalformedError:
        return None
    owners = {model.owned_by for model in models}
    return next(
        (k for k, d in ENGINE_PROFILES.items() if d.model_owner and d.model_owner in owners), None
    )


def read_server_version(server: HttpClient, profile: EngineProfile) -> str:
    """Return the version that the server reports; empty without a timely report."""
    for path in profile.version_paths:
        try:
            status, body = server.call("GET", path, IDENTIFY_TIMEOUT_S)
            version = decode(body, _Version).version if status == 200 else ""
        except EngineError:
            return ""
        except MalformedError:
            continue
        if version:
            return version[:64]
    return ""


def _fetch(server: HttpClient, path: str) -> bytes | None:
    try:
        status, body = server.call("GET", path, IDENTIFY_TIMEOUT_S)
    except EngineError:
        return None
    return body if status == 200 else None
