"""Publish the journal's incidents in Kubernetes, as LeakIncident objects and Events.

An unreachable API server blocks nothing else, because the publisher runs in a thread. An admission
policy limits the writes of a pod, so changes within a phase are published at increasing intervals.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import NamedTuple

from plimsoll_api.incident_object import (
    list_object_names,
    make_object,
    make_path,
    make_status_object,
)
from plimsoll_api.incident_story import make_record_story
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.leakincident import MAX_INCIDENTS_PER_POD, MAX_STATUS_WRITES
from plimsoll_api.names import API_VERSION, ENGINE_CONTAINER, INCIDENT_KIND
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import format_rfc3339
from plimsoll_sidecar.background import BackgroundThread
from plimsoll_sidecar.clients.kube import ConflictError, KubeClient, KubeError, NotFoundError
from plimsoll_sidecar.govern.incident import Incident

log = logging.getLogger(__name__)

WARNING_PHASES = frozenset({IncidentPhase.CONFIRMED, IncidentPhase.UNRESOLVED})
# After this many writes, even phase changes are delayed.
MAX_IMMEDIATE_WRITES = 60
# The name of an Event contains the pod's name, and may have 253 characters.
MAX_POD_NAME_CHARS = 230
# Only the end of the incident will still be published.
NEVER_S = float("inf")


class PublishedObject(NamedTuple):
    """LeakIncident object of an incident.

    ``revision`` is the number of writes of its status. ``at`` is the monotonic time of the last
    write; 0 if this process has not written the object.
    """

    name: str
    uid: str
    generation: int
    revision: int = 0
    phase: str | None = None
    at: float = 0.0


def compute_publish_delay_s(
    incident: Incident, published_object: PublishedObject | None, now: float
) -> float:
    """Return the seconds until ``incident`` may be published; 0 for immediately.

    :data:`NEVER_S` means that only the end of the incident may still be published. ``now`` is the
    monotonic time. Write number n follows n²/5 s after the previous write, so that all writes but
    the last together take half a day.
    """
    if published_object is None or incident.ended:
        return 0.0
    if published_object.revision >= MAX_STATUS_WRITES - 1:
        return NEVER_S
    if (
        incident.phase.value != published_object.phase
        and published_object.revision < MAX_IMMEDIATE_WRITES
    ):
        return 0.0
    return (
        max(0.0, published_object.at + published_object.revision**2 / 5 - now)
        if published_object.at
        else 0.0
    )


class Publisher:
    """Publishes incidents in Kubernetes, in a thread."""

    def __init__(
        self, kube: KubeClient, service: ServiceRef, pod: str, container: str = ENGINE_CONTAINER
    ) -> None:
        self._kube, self._service, self._pod, self._container = kube, service, pod, container
        self._latest: dict[str, tuple[int, Incident]] = {}
        self._written: dict[str, PublishedObject] = {}
        self._lock = threading.Lock()
        self._acknowledged: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._thread = BackgroundThread(
            "publisher", self._publish_next, expected_errors=(KubeError,)
        )

    def start(self) -> None:
        """Start publishing, in a thread that ends with the process."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread, and wait at most ``timeout_s`` for its end."""
        self._thread.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def queue_incident(self, revision: int, incident: Incident) -> None:
        """Queue a state of an incident, in place of its earlier states. Does not block.

        The caller must not change ``incident`` afterwards.
        """
        with self._lock:
            self._latest[incident.name] = (revision, incident)
        self._thread.wake()

    def take_acknowledged(self) -> list[tuple[str, int]]:
        """Return the incidents that were published since the last call, with their revisions."""
        acknowledged = []
        while not self._acknowledged.empty():
            acknowledged.append(self._acknowledged.get_nowait())
        return acknowledged

    @property
    def num_unpublished(self) -> int:
        """Number of incidents whose newest state has not been published."""
        with self._lock:
            return len(self._latest)

    def _publish_next(self) -> float | None:
        item, due_s = self._take_next_incident()
        if item is None:
            return None if due_s == NEVER_S else due_s
        revision, incident = item
        try:
            self.publish(incident)
        except Exception:
            with self._lock:
                self._latest.setdefault(incident.name, (revision, incident))
            raise
        self._acknowledged.put((incident.name, revision))
        return 0.0

    def publish(self, incident: Incident) -> None:
        """Write the LeakIncident object, its status and an Event. Raises KubeError."""
        namespace = self._service.namespace
        published_object = self._written.get(incident.name) or self._find_or_create(incident)
        if (
            published_object.revision >= MAX_STATUS_WRITES
        ):  # another client with this pod's token also wrote it
            log.error(
                "cannot update LeakIncident %s, because its status has been written %d "
                "times, which is the maximum; the operator will close the incident",
                published_object.name,
                MAX_STATUS_WRITES,
            )
            return
        self._written[incident.name] = published_object
        revision = published_object.revision + 1
        status = make_status_object(
            incident, published_object.name, self._service, revision, published_object.generation
        )
        try:
            self._kube.apply(make_path(namespace, published_object.name, "status"), status)
        except KubeError:
            # The object was deleted, or was written without a response. It must be read again.
            del self._written[incident.name]
            raise
        published_object = published_object._replace(
            revision=revision, phase=incident.phase.value, at=time.monotonic()
        )
        self._written[incident.name] = published_object
        self._create_event(incident, published_object)
        if incident.ended:
            del self._written[incident.name]

    def _find_or_create(self, incident: Incident) -> PublishedObject:
        # Raises KubeError if no name is free.
        namespace = self._service.namespace
        for name in list_object_names(incident, self._pod):
            try:
                stored_object = self._kube.get(make_path(namespace, name))
            except NotFoundError:
                body = make_object(incident, name, self._service, self._pod, self._container)
                stored_object = self._kube.create(make_path(namespace, ""), body)
            if stored_object["spec"].get("id") == incident.name:
                status, meta = stored_object.get("status") or {}, stored_object["metadata"]
                return PublishedObject(
                    name, meta["uid"], meta.get("generation", 1),
                    status.get("revision", 0), status.get("phase"),
                )  # fmt: skip
        raise KubeError(
            409,
            f"pod {self._pod} already has the maximum of {MAX_INCIDENTS_PER_POD} "
            "LeakIncidents: check that the operator is running, because it deletes the "
            "oldest ones",
        )

    def _create_event(self, incident: Incident, published: PublishedObject) -> None:
        # The admission policy accepts only such names from a pod, which limits the number of its
        # Events.
        number = published.name.rpartition("-")[2]
        name = f"{self._pod[:MAX_POD_NAME_CHARS]}-{number}.{incident.phase.value.lower()}"
        at = format_rfc3339(incident.phase_since)
        namespace = self._service.namespace
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": INCIDENT_KIND,
                "namespace": namespace,
                "name": published.name,
                "uid": published.uid,
            },
            "reason": incident.phase.value,
            "message": make_record_story(incident).sentence[:1024],
            "type": "Warning" if incident.phase in WARNING_PHASES else "Normal",
            "source": {"component": "plimsoll-supervisor", "host": self._pod},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            self._kube.create(f"/api/v1/namespaces/{namespace}/events", body)
        except ConflictError:
            return  # the Event already exists
        except KubeError as error:
            if error.is_transient:
                raise
            # The object contains the same information.
            log.warning("failed to create Event %s: %s", name, error)

    def _take_next_incident(self) -> tuple[tuple[int, Incident] | None, float]:
        due_s, now = NEVER_S, time.monotonic()
        with self._lock:
            for name, (revision, incident) in list(self._latest.items()):
                wait = compute_publish_delay_s(incident, self._written.get(name), now)
                if wait == 0.0:
                    return self._latest.pop(name), 0.0
                if wait == NEVER_S:
                    log.warning(
                        "incident %s has reached the maximum of %d published changes, so "
                        "only its end will be published",
                        name,
                        MAX_STATUS_WRITES - 1,
                    )
                    del self._latest[name]
                    self._acknowledged.put((name, revision))
                due_s = min(due_s, wait)
        return None, due_s
