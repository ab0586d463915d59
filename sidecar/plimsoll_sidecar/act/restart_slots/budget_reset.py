"""Reset of the restart budget by a person: in the journal and on the slot Leases.

The supervisor resets its journal itself; the Leases change at once.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plimsoll_api.decoding import decode
from plimsoll_api.supervisor_config import SupervisorConfig
from plimsoll_sidecar.act.restart_slots import lease_counts
from plimsoll_sidecar.clients.kube import Conflict, KubeClient, Object

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


def clear(
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
        left += len(lease_counts.service_restarts(kube.get(path), window_s, kube.now()))
    limit = config.supervision.restart_budget.count * len(config.slots)
    whose = "of the service" if whole_service else "of this replica"
    text = f"cleared {cleared} restarts {whose} from the slot Leases"
    if left:
        text += f"; {left} of {limit} restarts of other replicas still count"
    if left >= limit:
        text += ", so no replica may restart: plimsoll resume --service clears them too"
    return text


def _clear(lease: Object, uid: str, pod: str, whole_service: bool) -> int:
    count = lease_counts.clear_replica(lease, uid, pod)
    return count + (lease_counts.clear_service(lease) if whole_service else 0)


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
