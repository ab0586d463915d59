"""Whether the engine of a multi-node group serves, for the supervisors of its workers.

A worker's own processes do not say when they have loaded their part of the model, which may take
many minutes. Its warm-up begins when the leader's engine is ready, by the leader's ``/state``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import msgspec

from plimsoll_api.admin import EngineState
from plimsoll_api.decoding import decode
from plimsoll_api.workloads import RAY_KIND
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.signals.group_pages import GroupPages
from plimsoll_sidecar.signals.sampler import WORKING

POLL_S = 5.0
ASKED_S = 10.0
"""Nobody is waiting who has not asked for so long."""
SURE_S = 10.0
"""So long the leader must have been ready: it may not have seen yet that its group restarts."""
_HEAD = re.compile(r".*-head(-.*)?")
"""KubeRay's names of head pods: nothing else in a RayCluster's Service tells them apart."""


def leader_of(kind: str, worker: str) -> Callable[[str], bool]:
    """Return what says by a pod's name whether it leads ``worker``, in a workload of this kind."""
    if kind == RAY_KIND:
        return lambda name: _HEAD.fullmatch(name) is not None
    leader, _, _ = worker.rpartition("-")
    return lambda name: name == leader


class _State(msgspec.Struct):
    """The part of ``/state`` that is read."""

    engine_state: EngineState | None = None


class GroupLeader:
    """The pod that leads a worker's group, asked in a thread while somebody wants to know."""

    def __init__(self, pages: GroupPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._asked = threading.Event()
        self._asked_at = float("-inf")
        self._ready_since: float | None = None
        self._thread: threading.Thread | None = None

    def serves(self) -> bool:
        """Return whether the leader's engine has been ready for :data:`SURE_S`; never waits."""
        self._asked_at = self._clock()
        self._asked.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="group-leader", daemon=True)
            self._thread.start()
        return self.ready_for() >= SURE_S

    def ready_for(self) -> float:
        """Return for how many seconds each answer was that it is ready; less than 0 for none."""
        since = self._ready_since
        return float("-inf") if since is None else self._clock() - since

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self.look()
            if self._clock() - self._asked_at > ASKED_S:
                self._ready_since = None
                self._asked.clear()
            time.sleep(POLL_S)

    def look(self) -> None:
        """Ask the leader once; never raises. One that cannot be asked is not known to be ready."""
        ready = self._ready()
        if not ready:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = self._clock()

    def _ready(self) -> bool:
        try:
            leaders = self._pages.pods()
        except KubeError as error:
            self._pages.note("endpoints", str(error))
            return False
        self._pages.note("endpoints", "" if leaders else "the leader is not among them")
        states = (self._pages.page(pod, address, _engine) for pod, address in leaders.items())
        return any(state in WORKING for state in states)


def _engine(page: bytes) -> EngineState | None:
    return decode(page, _State).engine_state
