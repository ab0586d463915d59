"""Which pods of a SupervisionPolicy are compared with each other."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_api.peers import Peer
from plimsoll_operator.policies.selected_pod import SelectedPod, State


def replicas_of_policy(pods: Iterable[SelectedPod]) -> list[Peer]:
    """Return the supervised pods of which the workload and its revision are known.

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
