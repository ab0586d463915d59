"""The page of a node's GPU exporter: each device's memory, and which pod it was given to."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from plimsoll_api.supervisor_config import NODE_IP
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.serving.prometheus_text import LABELS, LARGEST

SCRAPE_S = 10.0
"""The exporters themselves collect each 30 s by default."""
ANSWER_S = 2.0
MAX_ROWS = 4096
LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"')


@dataclass(frozen=True)
class Pod:
    """Whose devices are looked for; an empty container is any of the pod's."""

    namespace: str
    name: str
    container: str = ""

    @classmethod
    def of_environment(cls, container: str = "") -> Pod | None:
        """Return the pod that this process runs in; None outside of one."""
        name, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
        return cls(namespace, name, container) if name and namespace else None

    def owns(self, labels: dict[str, str]) -> bool:
        """Return whether a row is about this pod.

        Its labels name the pod, the namespace and, if any, the container.
        """
        if not self.name or labels.get("pod") != self.name:
            return False
        if labels.get("namespace") != self.namespace:
            return False
        return not self.container or labels.get("container") in (self.container, None, "")


@dataclass(frozen=True)
class Row:
    """One sample of the page."""

    metric: str
    labels: dict[str, str]
    value: float


class Page:
    """``names`` are the metrics that are read.

    A page that cannot be read has no rows: ``error`` then says why, for people.
    """

    def __init__(
        self, url: str, names: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._clock = HttpClient(url), clock
        plain = "|".join(sorted(map(re.escape, names)))
        self._lines = re.compile(rb"^(" + plain.encode() + rb")" + LABELS + rb"[ \t]+(\S+)", re.M)
        self._next = 0.0
        self._rows: list[Row] = []
        self.error: str | None = None

    def rows(self) -> list[Row]:
        """Return the newest samples, asked for once in :data:`SCRAPE_S`."""
        now = self._clock()
        if now >= self._next:
            self._next = now + SCRAPE_S
            self._rows, self.error = [], None
            try:
                status, page = self._server.call("GET", "/metrics", ANSWER_S)
            except EngineError as error:
                self.error = str(error)
                return self._rows
            if status != 200:
                self.error = f"GET /metrics: HTTP {status}"
                return self._rows
            self._rows = list(self._parsed(page))
            if not self._rows:
                self.error = "its metrics contain no device memory"
        return self._rows

    def _parsed(self, page: bytes) -> Iterable[Row]:
        for number, (metric, labels, text) in enumerate(self._lines.findall(page)):
            if number >= MAX_ROWS:
                return
            try:
                value = float(text)
            except ValueError:
                continue
            if math.isfinite(value) and 0 <= value < LARGEST:
                found = dict(LABEL.findall(labels.decode(errors="replace")))
                yield Row(metric.decode(), found, value)


def node_url(port: str | None) -> str | None:
    """Return the address of the pod's node at ``port``; None where either is unknown."""
    host = os.environ.get(NODE_IP)
    if not host or not port:
        return None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Exporter:
    """An exporter of device memory on the pod's node.

    A page that cannot be read leaves all devices unknown. ``pod`` is the pod whose devices are
    wanted, None for no pod.
    """

    PORT: ClassVar[str]
    """Environment variable with the exporter's port."""
    METRICS: ClassVar[tuple[str, ...]]

    def __init__(
        self, url: str, clock: Callable[[], float] = time.monotonic, pod: Pod | None = None
    ) -> None:
        self._page, self._pod = Page(url, self.METRICS, clock), pod

    @classmethod
    def of_node(cls, pod: Pod | None = None) -> Self | None:
        """Return the exporter that the environment names, None if it names none."""
        url = node_url(os.environ.get(cls.PORT))
        return cls(url, pod=pod) if url is not None else None

    @property
    def error(self) -> str | None:
        """Why the newest page says nothing; None if it can be read."""
        return self._page.error
