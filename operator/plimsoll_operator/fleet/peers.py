"""Which replicas are compared with one that may leak, and the file that tells of their growth.

Replicas of one revision under one load are each other's control group. The operator has their
growth from its scrapes, and supervisors read it beside their configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from plimsoll_api.incidents import ENDED
from plimsoll_api.peers import MAX_PEERS, Peer, encode
from plimsoll_operator.fleet.suspects import revision_of
from plimsoll_operator.kinds import Object

GROWTHS = ("HostGrowth", "DeviceGrowth")


def growing(incidents: Iterable[Object]) -> set[str]:
    """Return the pods with an open incident of growth."""
    return {
        str(one["spec"]["pod"])
        for one in incidents
        if one["spec"]["kind"] in GROWTHS and (one.get("status") or {}).get("phase") not in ENDED
    }


def replicas_of_service(pods: Iterable[Object]) -> list[Peer]:
    """Return the pods of an InferenceService whose revision is known; their growth is not yet."""
    return [
        Peer(pod["metadata"]["name"], revision) for pod in pods if (revision := revision_of(pod))
    ]


def summary(peers: Sequence[Peer], suspected: Collection[str]) -> str:
    """Return the file of the ``peers`` whose growth is known, empty if none can be compared.

    It has those of each workload with a ``suspected`` pod. Where not all have room, these pods come
    first.
    """
    workloads = {one.workload for one in peers if one.pod in suspected}
    known = [one for one in peers if one.workload in workloads and (one.host or one.device)]
    known.sort(key=lambda one: (one.pod not in suspected, one.pod))
    if len(known) < 2:
        return ""
    return encode(sorted(known[:MAX_PEERS], key=lambda one: one.pod)).decode()
