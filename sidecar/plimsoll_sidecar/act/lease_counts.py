"""Count the restarts of a service and of its replicas in the annotations of slot Leases.

Any client that may update the Lease can write them. Their size is therefore limited, and an
unreadable count is treated as an exhausted budget, never as zero. ``now`` is the API server's time.
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

# The API limits restartBudget.count to the same number.
MAX_SERVICE_RESTARTS = 1000
# The newest restarts are kept.
MAX_RESTARTS_PER_REPLICA = 64
# Together they need less than 96 KiB. Kubernetes limits annotations to 256 KiB.
MAX_REPLICAS_PER_LEASE = 64
MAX_ANNOTATION_BYTES = 1 << 17
# The clock of a node may be wrong, so its restarts are stored this much longer than the window.
MAX_CLOCK_SKEW_S = 86_400.0


class ServiceRestart(msgspec.Struct):
    """Restart ``at`` a time in Unix seconds, for the named ``incident``."""

    at: float
    incident: str


_Restarts = Annotated[list[ServiceRestart], msgspec.Meta(max_length=MAX_SERVICE_RESTARTS)]
_Replicas = Annotated[
    dict[str, ReplicaRestarts], msgspec.Meta(max_length=4 * MAX_REPLICAS_PER_LEASE)
]


class UnreadableCountError(ValueError):
    """An annotation that does not contain valid restarts."""


def read_service_restarts(lease: Object, window_s: float, now: float) -> list[ServiceRestart]:
    """Return the service's restarts in the window. Raises UnreadableCountError."""
    restarts = _read_annotation(lease, SERVICE_RESTARTS_ANNOTATION, _Restarts, b"[]")
    return [restart for restart in restarts if now - restart.at < window_s]


def add_service_restart(lease: Object, incident: str, window_s: float, now: float) -> None:
    """Add a restart at ``now``, one for each incident. Raises UnreadableCountError."""
    restarts = read_service_restarts(lease, window_s, now)
    if all(restart.incident != incident for restart in restarts):
        restarts.append(ServiceRestart(now, incident))
    _write_annotation(lease, SERVICE_RESTARTS_ANNOTATION, restarts[-MAX_SERVICE_RESTARTS:])


def read_replica_restarts(lease: Object, replica_key: str) -> ReplicaRestarts:
    """Return the restarts of one replica on ``lease``. Raises UnreadableCountError."""
    restarts_by_replica: dict[str, ReplicaRestarts] = _read_annotation(
        lease, REPLICA_RESTARTS_ANNOTATION, _Replicas, b"{}"
    )
    return restarts_by_replica.get(replica_key, NO_RESTARTS)


def store_replica_restarts(
    lease: Object, replica_key: str, restarts: ReplicaRestarts, window_s: float, now: float
) -> None:
    """Store the restarts of one replica, and remove replicas without recent restarts.

    Raises UnreadableCountError.
    """
    restarts_by_replica = _read_annotation(lease, REPLICA_RESTARTS_ANNOTATION, _Replicas, b"{}")
    restarts_by_replica[replica_key] = ReplicaRestarts(
        restarts.at[-MAX_RESTARTS_PER_REPLICA:], restarts.exhausted
    )
    living = {
        name: replica_restarts
        for name, replica_restarts in restarts_by_replica.items()
        if replica_restarts.exhausted
        or replica_restarts.list_within_window(window_s + MAX_CLOCK_SKEW_S, now)
    }
    newest = sorted(
        living, key=lambda name: (name == replica_key, max(living[name].at, default=0.0))
    )
    _write_annotation(
        lease,
        REPLICA_RESTARTS_ANNOTATION,
        {name: living[name] for name in newest[-MAX_REPLICAS_PER_LEASE:]},
    )


def clear_replica_restarts(lease: Object, replica_key: str, pod: str) -> int:
    """Remove the restarts of a replica, and return their number in the service's count.

    An unreadable annotation is removed completely, because a person requested the reset.
    """
    try:
        restarts_by_replica = _read_annotation(lease, REPLICA_RESTARTS_ANNOTATION, _Replicas, b"{}")
        restarts_by_replica.pop(replica_key, None)
    except UnreadableCountError:
        restarts_by_replica = {}
    _write_annotation(lease, REPLICA_RESTARTS_ANNOTATION, restarts_by_replica)
    try:
        restarts = _read_annotation(lease, SERVICE_RESTARTS_ANNOTATION, _Restarts, b"[]")
    except UnreadableCountError:
        restarts = []
    others = [restart for restart in restarts if restart.incident.rpartition("-")[0] != pod]
    _write_annotation(lease, SERVICE_RESTARTS_ANNOTATION, others)
    return len(restarts) - len(others)


def clear_service_restarts(lease: Object) -> int:
    """Remove all restarts of the service, and return their number; 0 if unreadable."""
    try:
        count = len(_read_annotation(lease, SERVICE_RESTARTS_ANNOTATION, _Restarts, b"[]"))
    except UnreadableCountError:
        count = 0
    _write_annotation(lease, SERVICE_RESTARTS_ANNOTATION, [])
    return count


def _get_annotations(lease: Object) -> dict[str, str]:
    annotations = lease["metadata"].get("annotations")
    return annotations if isinstance(annotations, dict) else {}


def _read_annotation(lease: Object, name: str, target_type: Any, default: bytes) -> Any:
    text = _get_annotations(lease).get(name, "").encode() or default
    try:
        if len(text) > MAX_ANNOTATION_BYTES:
            raise MalformedError(
                f"the annotation is larger than the maximum of {MAX_ANNOTATION_BYTES >> 10} KiB"
            )
        return decode(text, target_type)
    except MalformedError as error:
        raise UnreadableCountError(
            f"cannot read the annotation {name} of Lease {lease['metadata']['name']} ({error}): "
            "to clear it, run plimsoll resume POD --service"
        ) from error


def _write_annotation(lease: Object, name: str, value: object) -> None:
    annotations = dict(_get_annotations(lease))
    annotations.pop(name, None)
    if value:
        annotations[name] = msgspec.json.encode(value).decode()
    lease["metadata"]["annotations"] = annotations


MAX_UPDATE_ATTEMPTS = 5
UPDATE_RETRY_PAUSE_S = 0.1


def make_replica_key(group: GroupMember | None, uid: str) -> str:
    """Return the key for a replica's restarts: the pod's UID, or the multi-node group."""
    # A restart of a group may replace its pods, which must not reset the restart budget.
    return uid if group is None or not group.key else f"group {group.key}"


def read_pod_uid(token_file: Path) -> str:
    """Return this pod's UID from its service account token; empty if it cannot be read."""
    try:
        # The signature is not verified, because the file belongs to this pod.
        payload = token_file.read_text().split(".")[1]
        claims = decode(
            base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), dict[str, Any]
        )
        return str(claims["kubernetes.io"]["pod"]["uid"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def reset_counts(
    kube: KubeClient, config: SupervisorConfig, pod: str, replica_key: str, whole_service: bool
) -> str:
    """Clear the restarts of this replica or service, and return a summary. Raises KubeError."""
    cleared, left = 0, 0
    for name in config.slots:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{config.service.namespace}/leases/{name}"
        cleared += _update_lease(
            kube, path, lambda lease: _clear_restarts(lease, replica_key or pod, pod, whole_service)
        )
        window_s = config.supervision.restart_budget.window_s
        left += len(read_service_restarts(kube.get(path), window_s, kube.estimate_server_time()))
    limit = config.supervision.restart_budget.count * len(config.slots)
    whose = "of the service" if whole_service else "of this replica"
    text = f"cleared {cleared} restarts {whose} from the slot Leases"
    if left:
        text += f"; {left} restarts of other replicas still count against the limit of {limit}"
    if left >= limit:
        text += ", so no replica may restart: to clear them, run plimsoll resume --service"
    return text


def _clear_restarts(lease: Object, replica_key: str, pod: str, whole_service: bool) -> int:
    count = clear_replica_restarts(lease, replica_key, pod)
    return count + (clear_service_restarts(lease) if whole_service else 0)


def _update_lease(kube: KubeClient, path: str, apply_change: Callable[[Object], int]) -> int:
    for is_last in (*[False] * (MAX_UPDATE_ATTEMPTS - 1), True):
        lease = kube.get(path)
        count = apply_change(lease)
        try:
            kube.put(path, lease)
        except ConflictError:
            if is_last:
                raise
            time.sleep(UPDATE_RETRY_PAUSE_S)
        else:
            return count
    raise AssertionError("unreachable: the last attempt returns or raises")
