"""What a chaos run leaves behind, and how long Kubernetes alone takes to restart a group."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

VERBOSE = "--vmodule=garbagecollector=5,graph_builder=5,reflector=3"
"""Of kube-controller-manager: it tells what the garbage collector saw, and when it listed."""
PODS = "leaderworkerset.sigs.k8s.io/name=plain"
PLAIN = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: plain}
spec:
  replicas: 1
  leaderWorkerTemplate:
    size: 2
    restartPolicy: RecreateGroupOnPodRestart
    workerTemplate:
      spec:
        terminationGracePeriodSeconds: 1
        securityContext:
          {runAsUser: 10001, runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
        containers:
          - name: one
            command: [sleep, infinity]
            securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
"""


PLAIN_S = 120.0
"""A plain group is not waited for longer.

The garbage collector may miss the deletion of its StatefulSet. Nobody deletes its old worker by
hand then, as :class:`~tests.lab.chaos.Person` does for groups of a service.
"""


CONVERGES_S = 60.0
"""In all, with the time that Kubernetes' own controllers need. A group without Plimsoll, restarted
after the same kills, shows how much that is; after outages of the API server, it may be all."""


class History:
    """What happened when (UTC), in the file ``path``, to read beside the components' logs."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._last: dict[str, object] = {}

    def note(self, subject: str, state: object) -> None:
        """Write ``state`` unless it is the last one of ``subject``."""
        if self._last.get(subject) != state:
            self._last[subject] = state
            self._file.write(f"{datetime.now(UTC):%H:%M:%S.%f} {subject}: {state}\n")


class PlainGroup:
    """A group of a LeaderWorkerSet without Plimsoll, with the same restart policy.

    After outages of the API server, each watch of Kubernetes' own controllers waits for up to 60 s
    (client-go's reflector), and several of them take part in the restart of a group.

    ``image`` is one for its pods on a real node. Without it they are on no node, and their status
    is written here.
    """

    def __init__(self, kubectl: Any, image: str = "") -> None:
        self._kubectl, self._image = kubectl, image
        self._old: set[str] = set()

    def start(self) -> None:
        made = yaml.safe_load(PLAIN)
        spec = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        spec["containers"][0]["image"] = self._image or "one"
        if not self._image:
            spec["nodeSelector"] = {"plimsoll.dev/no-node": "true"}
        self._kubectl.apply(made)

    def restart(self) -> None:
        """Delete its leader. All pods of the group are replaced then."""
        self._old = self._uids(self._pods())
        self._kubectl.delete("pod", "plain-0")

    def runs(self) -> bool:
        """Whether both pods are there, none is from before the restart, and the set says so."""
        found = self._pods()
        for pod in () if self._image else found:
            self._kubectl.set_running(pod)
        group = self._kubectl.get("leaderworkerset", "plain") or {}
        ready = (group.get("status") or {}).get("readyReplicas") == 1
        return ready and len(found) == 2 and not self._uids(found) & self._old

    def _pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._kubectl.list("pods", PODS)
        return found

    @staticmethod
    def _uids(found: list[dict[str, Any]]) -> set[str]:
        return {one["metadata"]["uid"] for one in found}
