"""Which replicas are compared with one that may leak, and the file with their growth.

Replicas of one revision under one load are each other's control group. The operator has their
growth from its scrapes, and supervisors read it beside their configuration while an incident of
growth is open. Each text is kept for ``publish_s``, so a reconcile in between writes
nothing, and a quiet fleet costs no write at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from plimsoll_api.incidents import ENDED
from plimsoll_api.peers import MAX_PEERS, Peer, encode
from plimsoll_operator.config import CLOCKS
from plimsoll_operator.fleet.figures import Figures
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod, State
from plimsoll_operator.kinds import Key, Object

GROWTHS = ("HostGrowth", "DeviceGrowth")
UNKNOWN = Figures()


def growing(incidents: Iterable[Object]) -> set[str]:
    """Return the pods with an open incident of growth."""
    return {
        str(one["spec"]["pod"])
        for one in incidents
        if one["spec"]["kind"] in GROWTHS and (one.get("status") or {}).get("phase") not in ENDED
    }


def replicas_of_service(pods: Iterable[PodView]) -> list[Peer]:
    """Return the pods of an InferenceService whose revision is known; their growth is not yet."""
    return [Peer(pod.name, pod.revision) for pod in pods if pod.revision]


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


def replicas_of_policy(pods: Iterable[SelectedPod]) -> list[Peer]:
    """Return the supervised pods whose workload and revision are known.

    Their growth is not known yet. Pods of a multi-node group are left out: their roles differ.
    """
    return [
        Peer(one.name, one.member.revision, str(one.member.workload))
        for one in pods
        if one.state is State.SUPERVISED
        and one.member.workload is not None
        and one.member.revision
        and not one.member.group
    ]


class Summaries:
    """What was published last for each service and policy."""

    def __init__(self, clock: Callable[[], float], publish_s: float = CLOCKS.publish) -> None:
        self._clock, self._publish_s = clock, publish_s
        self._last: dict[Key, tuple[float, str]] = {}

    def text(
        self,
        key: Key,
        replicas: Iterable[Peer],
        incidents: Iterable[Object],
        figures: Mapping[str, Figures],
    ) -> str:
        """Return the file to publish now; empty while there is none.

        ``figures`` are by pod; they are empty until the pods were asked.
        """
        suspected = growing(incidents)
        if not suspected:
            self.forget(key)
            return ""
        now, known = self._clock(), self._last.get(key)
        if known is not None and now - known[0] < self._publish_s:
            return known[1]
        text = summary([_with_growth(one, figures) for one in replicas], suspected)
        if figures:
            self._last[key] = (now, text)
        return text

    def next_s(self, key: Key) -> float | None:
        """Return the seconds until the next file is due; None while none is."""
        known = self._last.get(key)
        return None if known is None else max(0.0, known[0] + self._publish_s - self._clock())

    def forget(self, key: Key) -> None:
        """After the service or policy is gone, or nothing is to be published any more."""
        self._last.pop(key, None)


def _with_growth(peer: Peer, figures: Mapping[str, Figures]) -> Peer:
    found = figures.get(peer.pod, UNKNOWN)
    return replace(peer, host=found.host_growth, device=found.device_growth)
