"""What an external engine's server is, and what it can do: asked once an epoch.

Routes are asked for by OPTIONS: one for another method answers 405, an unknown one 404, and nothing
is done by asking.
"""

from __future__ import annotations

import logging
import math
import re
import time
from urllib.parse import urlsplit

import msgspec

from plimsoll_api.admin import Capability
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.external_profile import PROFILES, EngineProfile
from plimsoll_sidecar.act.adapters.processes import OwnedProcesses
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.engine_processes import is_engine
from plimsoll_sidecar.signals.process_table import command_line

log = logging.getLogger(__name__)

ANSWER_S = 3.0
IDENTIFY_S = 2.0
VERSION_AGAIN_S = 30.0
_PREFIX = rb'^(?:\{")?(?:ray_)?%s[:_]'
"""Begins a line of an engine's metrics, as different writers spell it."""


class ServerInfo:
    """``routes`` are those of its profile that the server has, ``version`` is its own word."""

    def __init__(self, endpoint: EngineEndpoint, server: HttpClient, owned: OwnedProcesses) -> None:
        self._endpoint, self._profile = endpoint, PROFILES[endpoint.type]
        self._server, self._owned = server, owned
        self._mismatch = ""
        self.version = endpoint.version
        self.forget()

    def forget(self) -> None:
        """Another process serves. What is known of the version stays until it has said its own."""
        self.routes: frozenset[str] = frozenset()
        self._known, self._version_next = False, 0.0

    def learn(self) -> None:
        """From a server that serves."""
        if not self._known:
            self.routes, self._known = self._discover(), True
        self._learn_version()

    @property
    def capabilities(self) -> list[Capability]:
        """Drain and restart always; trim where the server has a route of the profile for it."""
        found = [Capability.DRAIN, Capability.RESTART_ENGINE]
        if any(path in self.routes for path in self._profile.trims):
            found.insert(0, Capability.TRIM)
        return found

    def verify_type(self) -> None:
        """Raise EngineError unless what answers is the type of engine that is looked after."""
        wanted = self._endpoint.type
        if wanted is EngineType.CUSTOM:
            return
        port = urlsplit(self._endpoint.serving_url).port or 80
        found = engine_type(self._server)
        trouble = ""
        if found is not None and found is not wanted:
            trouble = f"the server on port {port} is {found.value}, not {wanted.value}"
        elif found is None and not self._looks_right():
            trouble = f"the server on port {port} does not identify itself as {wanted.value}"
        if trouble and trouble != self._mismatch:
            log.warning("no engine: %s", trouble)
        self._mismatch = trouble
        if trouble:
            raise EngineError(trouble)

    def _looks_right(self) -> bool:
        """Whether it is the engine's own container, or a program of the right name."""
        members = self._owned.known()
        if members is None:  # it has ended since it answered
            return False
        if members.container is not None:
            return True
        return members.main is not None and is_engine(
            command_line(members.main.pid), self._endpoint.type
        )

    def _learn_version(self) -> None:
        """Once an epoch. SGLang asks its scheduler first, and may be too busy: asked again."""
        now = time.monotonic()
        if now < self._version_next:
            return
        found = server_version(self._server, self._profile)
        self.version = found or self.version
        self._version_next = math.inf if found else now + VERSION_AGAIN_S

    def _discover(self) -> frozenset[str]:
        paths = [*self._profile.trims, self._profile.pause, self._profile.resume]
        return frozenset(path for path in paths if path and self._has(path.partition("?")[0]))

    def _has(self, path: str) -> bool:
        try:
            return self._server.call("OPTIONS", path, ANSWER_S)[0] == 405
        except EngineError:
            return False


class _Model(msgspec.Struct):
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str = ""


def engine_type(server: HttpClient) -> EngineType | None:
    """Return the known engine that answers.

    None where nothing shows which it is, as behind an API key without metrics.
    """
    page = _get(server, "/metrics") or b""
    for kind, profile in PROFILES.items():
        if profile.prefix and re.search(_PREFIX % profile.prefix.encode(), page, re.M):
            return kind
    try:
        models = decode(_get(server, "/v1/models") or b"{}", _Models).data
    except Malformed:
        return None
    owners = {model.owned_by for model in models}
    return next((k for k, d in PROFILES.items() if d.owner and d.owner in owners), None)


def server_version(server: HttpClient, profile: EngineProfile) -> str:
    """Return what the server calls its version; empty where it does not say, or not in time."""
    for path in profile.version_paths:
        try:
            status, body = server.call("GET", path, IDENTIFY_S)
            found = decode(body, _Version).version if status == 200 else ""
        except EngineError:
            return ""
        except Malformed:
            continue
        if found:
            return found[:64]
    return ""


def _get(server: HttpClient, path: str) -> bytes | None:
    try:
        status, body = server.call("GET", path, IDENTIFY_S)
    except EngineError:
        return None
    return body if status == 200 else None
