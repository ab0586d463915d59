"""Read and write the restart counts in the annotations of slot Leases.

``plimsoll.dev/restarts`` counts the restarts of all replicas of the service.
``plimsoll.dev/replica-restarts`` stores the restart count of each replica's journal by pod UID, or
by multi-node group. This count outlives the journal and ends with the pod or the group. Any client
that may update the Lease can write both annotations. Their size is therefore limited, and an
unreadable count is treated as an exhausted budget, never as zero.

``now`` is always the API server's time (``estimate_server_time``), as are the times of the
service's restarts. The restarts of a replica carry the time of its node, which may be wrong.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.names import REPLICA_RESTARTS_ANNOTATION, SERVICE_RESTARTS_ANNOTATION
from plimsoll_api.supervisor_config import GroupMember, SupervisorConfig
from plimsoll_sidecar.clients.kube import ConflictError, KubeClient, Object
from plimsoll_sidecar.govern.restart_budget import NO_RESTARTS, ReplicaRestarts

MAX_RESTARTS = 1000
"""Maximum number of stored restarts of the service; ``restartBudget.count`` cannot be larger."""
MAX_RESTARTS_PER_REPLICA = 64
"""Maximum number of stored restarts of one replica; older ones are dropped."""
MAX_REPLICAS = 64
"""Maximum number of replicas on one Lease; those that restarted last are kept.

Together they need less than 96 KiB of the 256 KiB that annotations may have.
"""
MAX_ANNOTATION_BYTES = 1 << 17
MAX_CLOCK_SKEW_S = 86_400.0
"""Maximum error of a node's clock, in seconds.

The counts of a replica are kept this long beyond the window.
"""


class ServiceRestart(msgspec.Struct):
    """One restart of a replica of the service: its time in Unix seconds, and its incident."""

    at: float
    incident: str


_Restarts = Annotated[list[ServiceRestart], msgspec.Meta(max_length=MAX_RESTARTS)]
_Replicas = Annotated[dict[str, ReplicaRestarts], msgspec.Meta(max_length=4 * MAX_REPLICAS)]


class UnreadableCountError(ValueError):
    """Error for an annotation that is not a valid count.

    The message names the Lease and says what to do.
    """


def read_service_restarts(lease: Object, window_s: float, now: float) -> list[ServiceRestart]:
    """Return the service's restarts within the window. Raises UnreadableCountError."""
    found = _read_annotation(lease, SERVICE_RESTARTS_ANNOTATION, _Restarts, b"[]")
    return [restart for restart in found if now - restart.at < window_s]


def add_service_restart(lease: Object, incident: str, window_s: float, now: float) -> None:
    """Add a restart of the service, once per incident. Raises UnreadableCountError."""
    restarts = read_service_restarts(lease, window_s, now)
    if all(restart.incident != incident for restart in restarts):
        restarts.append(ServiceRestart(now, incident))
    _write_annotation(lease, SERVICE_RESTARTS_ANNOTATION, restarts[-MAX_RESTARTS:])


def read_replica_restarts(lease: Object, uid: str) -> ReplicaRestarts:
    """Return the stored restarts of the replica. Raises UnreadableCountError."""
    known: dict[str, ReplicaRestarts] = _read_annotation(
        lease, REPLICA_RESTARTS_ANNOTATION, _Replicas, b"{}"
    )
    return known.get(uid, NO_RESTARTS)


def store_replica_restarts(
    lease: Object, uid: str, restarts: ReplicaRestarts, window_s: float, now: float
) -> None:
    """Store the restarts of one replica, and remove replicas whose restarts no longer count.

    Raises UnreadableCountError.
    """
    known = _read_annotation(lease, REPLICA_RESTARTS_ANNOTATION, _Replicas, b"{}")
    known[uid] = ReplicaRestarts(restarts.at[-MAX_RESTARTS_PER_REPLICA:], restarts.exhausted)
    living = {
        name: one
        for name, one in known.items()
        if one.exhausted or one.within(window_s + MAX_CLOCK_SKEW_S, now)
    }
    newest = sorted(living, key=lambda name: (name == uid, max(living[name].at, default=0.0)))
    _write_annotation(
        lease, REPLICA_RESTARTS_ANNOTATION, {name: living[name] for name in newest[-MAX_REPLICAS:]}
    )


def clear_replica_restarts(lease: Object, uid: str, pod: str) -> int:
    """Remove the restarts of a replica, and return how many of them counted for the service.

    An unreadable annotation is removed completely, because a person requested the reset.
    """
    try:
        known = _read_annotation(lease, REPLICA_RESTARTS_ANNOTATION, _Replicas, b"{}")
        known.pop(uid, None)
    except UnreadableCountError:
        known = {}
    _write_annotation(lease, REPLICA_RESTARTS_ANNOTATION, known)
    try:
        restarts = _read_annotation(lease, SERVICE_RESTARTS_ANNOTATION, _Restarts, b"[]")
    except UnreadableCountError:
        restarts = []
    others = [one for one in restarts if one.incident.rpartition("-")[0] != pod]
    _write_annotation(lease, SERVICE_RESTARTS_ANNOTATION, others)
    return len(restarts) - len(others)


def clear_service_restarts(lease: Object) -> int:
    """Remove all restarts of the service, and return their number; 0 if it is unreadable."""
    try:
        count = len(_read_annotation(lease, SERVICE_RESTARTS_ANNOTATION, _Restarts, b"[]"))
    except UnreadableCountError:
        count = 0
    _write_annotation(lease, SERVICE_RESTARTS_ANNOTATION, [])
    return count


def _get_annotations(lease: Object) -> dict[str, str]:
    found = lease["metadata"].get("annotations")
    return found if isinstance(found, dict) else {}


def _read_annotation(lease: Object, name: str, kind: Any, empty: bytes) -> Any:
    text = _get_annotations(lease).get(name, "").encode() or empty
    try:
        if len(text) > MAX_ANNOTATION_BYTES:
            raise MalformedError(f"the annotation is larger than {MAX_ANNOTATION_BYTES >> 10} KiB")
        return decode(text, kind)
    except MalformedError as error:
        raise UnreadableCountError(
            f"cannot read the annotation {name} of Lease {lease['metadata']['name']} ({error}): "
            "clear it with plimsoll resume POD --service"
        ) from error


def _write_annotation(lease: Object, name: str, value: object) -> None:
    """Set the annotation, or remove it if ``value`` is empty."""
    annotations = dict(_get_annotations(lease))
    annotations.pop(name, None)
    if value:
        annotations[name] = msgspec.json.encode(value).decode()
    lease["metadata"]["annotations"] = annotations


MAX_ATTEMPTS = 5
"""Maximum number of attempts to update a Lease that others update at the same time."""
RETRY_PAUSE_S = 0.1


def make_replica_key(group: GroupMember | None, uid: str) -> str:
    """Return the name under which a replica's restarts are stored: its pod's UID, or its group.

    A restart of a group may replace its pods, and must not give the group its budget back.
    """
    return uid if group is None or not group.key else f"group {group.key}"


def read_pod_uid(token_file: Path) -> str:
    """Return this pod's UID from its service account token; empty if it cannot be read.

    The token is not verified, because it is the pod's own.
    """
    try:
        payload = token_file.read_text().split(".")[1]
        claims = decode(
            base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), dict[str, Any]
        )
        return str(claims["kubernetes.io"]["pod"]["uid"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def reset_counts(
    kube: KubeClient, config: SupervisorConfig, pod: str, uid: str, whole_service: bool
) -> str:
    """Clear restart counts on the Leases. Return a text about the cleared and remaining counts.

    The counts of this replica are cleared, or with ``whole_service`` those of all replicas. Raises
    KubeError.
    """
    cleared, left = 0, 0
    for name in config.slots:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{config.service.namespace}/leases/{name}"
        cleared += _update_lease(
            kube, path, lambda lease: _clear_restarts(lease, uid or pod, pod, whole_service)
        )
        window_s = config.supervision.restart_budget.window_s
        left += len(read_service_restarts(kube.get(path), window_s, kube.estimate_server_time()))
    limit = config.supervision.restart_budget.count * len(config.slots)
    whose = "of the service" if whole_service else "of this replica"
    text = f"cleared {cleared} restarts {whose} from the slot Leases"
    if left:
        text += f"; {left} of {limit} restarts of other replicas still count"
    if left >= limit:
        text += ", so no replica may restart: clear them as well with plimsoll resume --service"
    return text


def _clear_restarts(lease: Object, uid: str, pod: str, whole_service: bool) -> int:
    count = clear_replica_restarts(lease, uid, pod)
    return count + (clear_service_restarts(lease) if whole_service else 0)


def _update_lease(kube: KubeClient, path: str, change: Callable[[Object], int]) -> int:
    for is_last in (*[False] * (MAX_ATTEMPTS - 1), True):
        lease = kube.get(path)
        count = change(lease)
        try:
            kube.put(path, lease)
        except ConflictError:
            if is_last:
                raise
            time.sleep(RETRY_PAUSE_S)
        else:
            return count
    raise AssertionError("unreachable: the last attempt returns or raises")
