"""Leaks in running engines, one after the other in each group or role, while processes are killed.

A leak is begun in a file of the pod's volume: neither the API server nor the kubelet takes part.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from tests.lab.chaos_record import History
from tests.lab.kube import Kube
from tests.lab.lab import Lab
from tests.node.supervised import ready_since, warm

ENDS = ("Resolved", "Unresolved", "Suppressed")
PAUSE_S = (1.0, 5.0)
LOOK_S = 0.5
JOIN_S = 60.0
Pods = dict[str, dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """``size`` pods that ``selector`` finds. A leak in one of them restarts ``container``, or the
    pods all together."""

    name: str
    selector: str
    size: int
    container: str

    def pods(self, kube: Kube) -> Pods:
        """Those that are not being deleted, by name."""
        found = kube.list("pods", self.selector)
        there = (one for one in found if not one["metadata"].get("deletionTimestamp"))
        return {one["metadata"]["name"]: one for one in there}

    def restarts(self, pod: dict[str, Any]) -> int:
        """How often the engine's container was started again."""
        listed = pod.get("status", {}).get("containerStatuses", ())
        found = [one["restartCount"] for one in listed if one["name"] == self.container]
        return int(sum(found))

    def run(self, kube: Kube) -> Pods:
        """Its pods if all are ready, else none."""
        found = self.pods(kube)
        whole = len(found) == self.size and all(map(ready_since, found.values()))
        return found if whole else {}

    def open_incidents(self, kube: Kube) -> list[str]:
        """Of its pods."""
        pods = self.pods(kube)
        return [
            one["metadata"]["name"]
            for one in kube.list("leakincidents")
            if one["spec"]["pod"] in pods and one.get("status", {}).get("phase") not in ENDS
        ]


class Leaks:
    """Begins leaks until :meth:`rest`. ``begun`` counts them by target."""

    def __init__(
        self, lab: Lab, kube: Kube, targets: list[Target], seed: int, history: History
    ) -> None:
        self._lab, self._kube, self._targets, self._history = lab, kube, targets, history
        self.begun: Counter[str] = Counter()
        self.steps: dict[str, str] = {}
        self._resting, self._ending = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(one, random.Random(f"{seed} {one.name}")))
            for one in targets
        ]

    def __enter__(self) -> Leaks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._resting.set()
        self._ending.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def rest(self) -> None:
        """No leak begins any more; the restarts for those that have begun are waited for."""
        self._resting.set()

    @property
    def at_rest(self) -> bool:
        """Whether each leak that was begun has led to a restart, and all pods are ready."""
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, target: Target, dice: random.Random) -> None:
        while not self._resting.wait(dice.uniform(*PAUSE_S)):
            self._step(target, "wait for a baseline")
            if not (found := self._insist(lambda: self._warm(target), self._resting)):
                return
            name = dice.choice(sorted(found))
            uid, before = found[name]["metadata"]["uid"], target.restarts(found[name])
            assert self._lab.node is not None
            (self._lab.node.volume(uid, "tmp") / "sick").touch()
            self.begun[target.name] += 1
            self._step(target, f"leak in {name} {uid}")

            def restarted(name: str = name, uid: str = uid, before: int = before) -> bool:
                pod = target.run(self._kube).get(name)
                return pod is not None and (
                    pod["metadata"]["uid"] != uid or target.restarts(pod) > before
                )

            self._insist(restarted, self._ending)
            self._step(target, "restarted and ready")

    def _warm(self, target: Target) -> Pods:
        """The pods, if each has a baseline and no incident is open."""
        found = target.run(self._kube)
        cold = not all(map(warm, found.values()))
        return {} if cold or target.open_incidents(self._kube) else found

    def _insist(self, call: Callable[[], T], end: threading.Event) -> T | None:
        """Call until it is true, whatever the API server does. None at ``end``."""
        while not end.wait(LOOK_S):
            try:
                if value := call():
                    return value
            except (AssertionError, httpx.HTTPError, KeyError):
                continue
        return None

    def _step(self, target: Target, step: str) -> None:
        self.steps[target.name] = f"{step} ({self.begun[target.name]})"
        self._history.note(target.name, self.steps[target.name])
