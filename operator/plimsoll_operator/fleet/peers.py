"""Make the files with which supervisors compare the growth of their replica and its peers.

Replicas of the same revision under the same load are a control group for each other. The operator
scrapes their growth. While a growth incident is open, it publishes the growth in a file next to the
supervisors' configuration. The file changes at most every ``publish_s`` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from plimsoll_api.incidents import ENDED_PHASES, GROWTH_INCIDENT_KINDS
from plimsoll_api.peers import MAX_PEERS, Peer, encode_peers
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.supervisor_figures import UNKNOWN_FIGURES, SupervisorFigures
from plimsoll_operator.kinds import Key, Object


def list_pods_with_growth(incidents: Iterable[Object]) -> set[str]:
    """Return the names of the pods with an open growth incident."""
    return {
        str(incident["spec"]["pod"])
        for incident in incidents
        if incident["spec"]["kind"] in GROWTH_INCIDENT_KINDS
        and (incident.get("status") or {}).get("phase") not in ENDED_PHASES
    }


def list_service_peers(pods: Iterable[PodView]) -> list[Peer]:
    """Return the pods of an InferenceService as peers with unknown growth.

    Pods without a known revision are excluded.
    """
    return [Peer(pod.name, pod.revision) for pod in pods if pod.revision]


def make_peers_file(peers: Sequence[Peer], suspected: Collection[str]) -> str:
    """Return the content of a peers file; empty if fewer than two ``peers`` have a known growth.

    The file contains the peers of each workload with a ``suspected`` pod. If the file would be too
    large, suspected pods take precedence.
    """
    workloads = {one.workload for one in peers if one.pod in suspected}
    known = [one for one in peers if one.workload in workloads and (one.host or one.device)]
    known.sort(key=lambda one: (one.pod not in suspected, one.pod))
    if len(known) < 2:
        return ""
    return encode_peers(sorted(known[:MAX_PEERS], key=lambda one: one.pod)).decode()


def list_policy_peers(pods: Iterable[SelectedPod]) -> list[Peer]:
    """Return the supervised pods of a policy as peers with unknown growth.

    Pods without a known workload and revision are excluded, and pods of multi-node groups, because
    their roles differ.
    """
    return [
        Peer(one.name, one.member.revision, str(one.member.workload))
        for one in pods
        if one.state is SupervisionState.SUPERVISED
        and one.member.workload is not None
        and one.member.revision
        and not one.member.group
    ]


class PeersFileCache:
    """Cache of the last published peers file of each service and policy."""

    def __init__(
        self, clock: Callable[[], float], publish_s: float = DEFAULT_INTERVALS.publish
    ) -> None:
        self._clock, self._publish_s = clock, publish_s
        self._last: dict[Key, tuple[float, str]] = {}

    def make_text(
        self,
        key: Key,
        replicas: Iterable[Peer],
        incidents: Iterable[Object],
        figures: Mapping[str, SupervisorFigures],
    ) -> str:
        """Return the content of the peers file to publish now; empty for no file.

        ``figures`` maps pod names to scraped figures, and is empty before the first scrape.
        """
        suspected = list_pods_with_growth(incidents)
        if not suspected:
            self.forget(key)
            return ""
        now, known = self._clock(), self._last.get(key)
        if known is not None and now - known[0] < self._publish_s:
            return known[1]
        text = make_peers_file([_add_growth(one, figures) for one in replicas], suspected)
        if figures:
            self._last[key] = (now, text)
        return text

    def compute_next_s(self, key: Key) -> float | None:
        """Return the seconds until the file must be updated again; None if no update is due."""
        known = self._last.get(key)
        return None if known is None else max(0.0, known[0] + self._publish_s - self._clock())

    def forget(self, key: Key) -> None:
        """Drop the file of a service or policy."""
        self._last.pop(key, None)


def _add_growth(peer: Peer, figures: Mapping[str, SupervisorFigures]) -> Peer:
    values = figures.get(peer.pod, UNKNOWN_FIGURES)
    return replace(peer, host=values.host_growth, device=values.device_growth)
