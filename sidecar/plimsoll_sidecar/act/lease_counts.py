"""The restart counts that a slot Lease carries in its annotations, and their reset by a person.

``plimsoll.dev/restarts`` counts the restarts of all replicas of the service.
``plimsoll.dev/replica-restarts`` keeps the count of each replica's journal, by the pod's UID: it
outlives the journal and ends with the pod. Any client that may update the Lease can write both, so
they are bounded, and an unreadable one counts as a spent budget, never as zero.

``now`` is always the API server's time, by which the service's restarts are counted. The restarts
of a replica have the time of its own node, which may be wrong.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.names import REPLICA_RESTARTS, SERVICE_RESTARTS
from plimsoll_api.supervisor_config import SupervisorConfig
from plimsoll_sidecar.clients.kube import Conflict, KubeClient, Object
from plimsoll_sidecar.govern.restart_budget import NONE, ReplicaRestarts

MAX_RESTARTS = 1000
"""Restarts read and kept of the service: ``restartBudget.count`` allows no more."""
MAX_OF_REPLICA = 64
"""Restarts kept of one replica, the newest."""
MAX_KEPT_REPLICAS = 64
"""Replicas kept on one Lease, those that restarted last. With MAX_OF_REPLICA they need less than
96 KiB, of the 256 KiB that an object's annotations may have."""
MAX_BYTES = 1 << 17
SKEW_S = 86_400.0
"""By how much the clock of another replica's node may be wrong: its counts are kept for this long
beyond the window."""


class ServiceRestart(msgspec.Struct):
    """One restart within the service: Unix seconds, and the incident it was for."""

    at: float
    incident: str


_Restarts = Annotated[list[ServiceRestart], msgspec.Meta(max_length=MAX_RESTARTS)]
_Replicas = Annotated[dict[str, ReplicaRestarts], msgspec.Meta(max_length=4 * MAX_KEPT_REPLICAS)]


class UnreadableError(ValueError):
    """An annotation that is no count; the message names the Lease and says what to do."""


def service_restarts(lease: Object, window_s: float, now: float) -> list[ServiceRestart]:
    """Read the service's restarts on this Lease that still count. Raises UnreadableError."""
    found = _read(lease, SERVICE_RESTARTS, _Restarts, b"[]")
    return [restart for restart in found if now - restart.at < window_s]


def count_service(lease: Object, incident: str, window_s: float, now: float) -> None:
    """Count a restart, once for each incident. Raises UnreadableError."""
    restarts = service_restarts(lease, window_s, now)
    if all(restart.incident != incident for restart in restarts):
        restarts.append(ServiceRestart(now, incident))
    _write(lease, SERVICE_RESTARTS, restarts[-MAX_RESTARTS:])


def of_replica(lease: Object, uid: str) -> ReplicaRestarts:
    """Read what this Lease keeps of the replica. Raises UnreadableError."""
    known: dict[str, ReplicaRestarts] = _read(lease, REPLICA_RESTARTS, _Replicas, b"{}")
    return known.get(uid, NONE)


def keep_replica(
    lease: Object, uid: str, restarts: ReplicaRestarts, window_s: float, now: float
) -> None:
    """Replace what the Lease keeps of one replica, and forget others that no longer count.

    Raises UnreadableError.
    """
    known = _read(lease, REPLICA_RESTARTS, _Replicas, b"{}")
    known[uid] = ReplicaRestarts(restarts.at[-MAX_OF_REPLICA:], restarts.exhausted)
    living = {
        name: one
        for name, one in known.items()
        if one.exhausted or one.within(window_s + SKEW_S, now)
    }
    newest = sorted(living, key=lambda name: (name == uid, max(living[name].at, default=0.0)))
    _write(lease, REPLICA_RESTARTS, {name: living[name] for name in newest[-MAX_KEPT_REPLICAS:]})


def clear_replica(lease: Object, uid: str, pod: str) -> int:
    """Forgets a replica, and its part of the service's restarts; how many of the latter.

    What cannot be read is removed as a whole: a person asked for it.
    """
    try:
        known = _read(lease, REPLICA_RESTARTS, _Replicas, b"{}")
        known.pop(uid, None)
    except UnreadableError:
        known = {}
    _write(lease, REPLICA_RESTARTS, known)
    try:
        restarts = _read(lease, SERVICE_RESTARTS, _Restarts, b"[]")
    except UnreadableError:
        restarts = []
    others = [one for one in restarts if one.incident.rpartition("-")[0] != pod]
    _write(lease, SERVICE_RESTARTS, others)
    return len(restarts) - len(others)


def clear_service(lease: Object) -> int:
    """Forgets all restarts of the service; how many there were, as far as they can be read."""
    try:
        count = len(_read(lease, SERVICE_RESTARTS, _Restarts, b"[]"))
    except UnreadableError:
        count = 0
    _write(lease, SERVICE_RESTARTS, [])
    return count


def _annotations(lease: Object) -> dict[str, str]:
    found = lease["metadata"].get("annotations")
    return found if isinstance(found, dict) else {}


def _read(lease: Object, name: str, kind: Any, empty: bytes) -> Any:
    text = _annotations(lease).get(name, "").encode() or empty
    try:
        if len(text) > MAX_BYTES:
            raise Malformed(f"it has more than {MAX_BYTES >> 10} KiB")
        return decode(text, kind)
    except Malformed as error:
        raise UnreadableError(
            f"Lease {lease['metadata']['name']}: annotation {name} cannot be read ({error}):"
            " clear it with plimsoll resume POD --service"
        ) from error


def _write(lease: Object, name: str, value: object) -> None:
    """Set the annotation, or remove it if there is nothing to keep."""
    annotations = dict(_annotations(lease))
    annotations.pop(name, None)
    if value:
        annotations[name] = msgspec.json.encode(value).decode()
    lease["metadata"]["annotations"] = annotations


TRIES = 5
"""Against a Lease that others write at the same time."""
PAUSE_S = 0.1


def pod_uid(token_file: Path) -> str:
    """Read this pod's UID from the token that Kubernetes mounts; empty if that fails.

    The token is not verified: it is our own.
    """
    try:
        payload = token_file.read_text().split(".")[1]
        claims = decode(
            base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), dict[str, Any]
        )
        return str(claims["kubernetes.io"]["pod"]["uid"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def reset(
    kube: KubeClient, config: SupervisorConfig, pod: str, uid: str, whole_service: bool
) -> str:
    """Clear the restart counts on the Leases; say what was cleared and what still counts.

    This clears what this replica has spent, or with ``whole_service`` everything. Raises KubeError.
    """
    cleared, left = 0, 0
    for name in config.slots:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{config.service.namespace}/leases/{name}"
        cleared += _update(kube, path, lambda lease: _clear(lease, uid or pod, pod, whole_service))
        window_s = config.supervision.restart_budget.window_s
        left += len(service_restarts(kube.get(path), window_s, kube.now()))
    limit = config.supervision.restart_budget.count * len(config.slots)
    whose = "of the service" if whole_service else "of this replica"
    text = f"cleared {cleared} restarts {whose} from the slot Leases"
    if left:
        text += f"; {left} of {limit} restarts of other replicas still count"
    if left >= limit:
        text += ", so no replica may restart: plimsoll resume --service clears them too"
    return text


def _clear(lease: Object, uid: str, pod: str, whole_service: bool) -> int:
    count = clear_replica(lease, uid, pod)
    return count + (clear_service(lease) if whole_service else 0)


def _update(kube: KubeClient, path: str, change: Callable[[Object], int]) -> int:
    for last in (*[False] * (TRIES - 1), True):
        lease = kube.get(path)
        count = change(lease)
        try:
            kube.put(path, lease)
        except Conflict:
            if last:
                raise
            time.sleep(PAUSE_S)
        else:
            return count
    raise AssertionError("the last try returns or raises")
