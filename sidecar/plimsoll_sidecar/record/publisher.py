"""Brings incidents from the journal to Kubernetes: LeakIncident objects, and an Event a phase.

A thread of its own: the API server may be away for hours without holding up anything. Only the
newest state of each incident is kept here, the journal keeps what has not arrived, so nothing is
lost by a restart either.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading

from plimsoll_api.incident_object import (
    object_of,
    path_of,
    status_object_of,
)
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.names import API_VERSION, ENGINE_CONTAINER, INCIDENT_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import rfc3339
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.background import Part
from plimsoll_sidecar.clients.kube import KubeClient, KubeError
from plimsoll_sidecar.govern.incident import Incident, budgeted

log = logging.getLogger(__name__)

WARNINGS = frozenset({IncidentPhase.CONFIRMED, IncidentPhase.UNRESOLVED})


class Publisher:
    """``offer`` and ``acknowledged`` are for the journal's thread; neither ever blocks."""

    def __init__(
        self, kube: KubeClient, service: ServiceRef, pod: str, container: str = ENGINE_CONTAINER
    ) -> None:
        self._kube, self._service, self._pod, self._container = kube, service, pod, container
        self._latest: dict[str, tuple[int, Incident]] = {}
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._arrived: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._part = Part("publisher", self._turn, expected=(KubeError,))
        self.failures = 0

    def start(self) -> None:
        """Begin to publish, in a thread that ends with the process."""
        self._part.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread; what has not arrived stays in the journal."""
        self._part.stop()
        if self._part.is_alive():
            self._part.join(timeout_s)

    def offer(self, revision: int, incident: Incident) -> None:
        """Take over a state; ``incident`` must not be changed afterwards."""
        with self._lock:
            self._latest[incident.name] = (revision, incident)
        self._part.wake()

    def acknowledged(self) -> list[tuple[str, int]]:
        """Names and revisions that have arrived since the last call."""
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get_nowait())
        return found

    @property
    def backlog(self) -> int:
        """How many incidents Kubernetes does not have in their newest state."""
        with self._lock:
            return len(self._latest)

    def _turn(self) -> float | None:
        """Publish one incident; None, wait for more, where there is none."""
        item = self._next()
        if item is None:
            return None
        revision, incident = item
        try:
            self.publish(incident)
        except Exception:
            self.failures += 1
            self._put_back(revision, incident)
            raise
        self._arrived.put((incident.name, revision))
        return 0.0

    def publish(self, incident: Incident) -> None:
        """Object, status, Event; each may be repeated. Raises KubeError."""
        namespace = self._service.namespace
        if incident.name not in self._known:
            body = object_of(incident, self._service, self._pod, self._container)
            self._kube.apply(path_of(namespace, incident.name), body)
            self._known.add(incident.name)
        status = status_object_of(incident, self._service)
        try:
            applied = self._kube.apply(path_of(namespace, incident.name, "status"), status)
        except KubeError as error:
            if error.status == 404:
                self._known.discard(incident.name)  # it was deleted: made anew by the next try
            raise
        self._event(incident, applied.get("metadata", {}).get("uid", ""))

    def _event(self, incident: Incident, uid: str) -> None:
        """One Event a phase: its name is made from both, so that a repetition finds it there."""
        digest = hashlib.sha256(f"{incident.name}/{incident.phase}".encode()).hexdigest()[:16]
        at = rfc3339(incident.phase_since)
        namespace = self._service.namespace
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{incident.name[:200]}.{digest}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": INCIDENT_KIND,
                "namespace": namespace,
                "name": incident.name,
                "uid": uid,
            },
            "reason": incident.phase.value,
            "message": describe(incident)[:1024],
            "type": "Warning" if incident.phase in WARNINGS else "Normal",
            "source": {"component": "plimsoll-supervisor", "host": self._pod},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            self._kube.create(f"/api/v1/namespaces/{namespace}/events", body)
        except KubeError as error:
            if error.status == 403:
                log.warning("Event %s: %s", incident.phase, error)  # the object tells it anyway
            elif error.status != 409:  # 409: it is there already
                raise

    def _next(self) -> tuple[int, Incident] | None:
        with self._lock:
            if not self._latest:
                return None
            return self._latest.pop(next(iter(self._latest)))

    def _put_back(self, revision: int, incident: Incident) -> None:
        with self._lock:
            self._latest.setdefault(incident.name, (revision, incident))


def describe(incident: Incident) -> str:
    """One sentence for an Event or a log line."""
    seen = incident.attribution
    where = f" in {seen.segment}" if seen.segment else ""
    size = f" of {format_bytes(seen.bytes)}{where}" if seen.bytes else ""
    text = f"{incident.kind.value}{size}"
    if budgeted(incident.kind):
        text += f", {100 * incident.consumed_ratio:.0f} % of the budget"
    if incident.returned_bytes is not None:
        text += f", {format_bytes(incident.returned_bytes)} returned"
    if incident.reason is not None:
        text += f" ({incident.reason.value})"
    return f"{text}. {incident.message}".strip()
