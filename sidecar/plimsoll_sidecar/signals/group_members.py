"""What the supervisors of the other pods of a multi-node group say: read by the leader's.

Each of their supervisors shows its newest assessment under ``/state``. A false one can make the
leader restart its own group, and nothing else.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import msgspec

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.workloads import RAY_KIND
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.signals.group_pages import MAX_PODS, MAX_TEXT, GroupPages

POLL_S = 5.0
STALE_S = 20.0
"""An answer older than this says nothing of now."""
MAX_EVIDENCE = 8
MAX_BYTES = 1 << 60
"""More memory than a pod can have."""


def workers_of(kind: str, leader: str) -> Callable[[str], bool]:
    """Return what says by a pod's name whether ``leader`` leads it.

    ``kind`` is that of the workload. The headless Service of a LeaderWorkerSet lists the pods of
    all groups, whose names tell them apart. That of a RayCluster lists its own pods, whose names
    tell nothing.
    """
    if kind == RAY_KIND:
        return lambda name: name not in ("", leader)
    worker = re.compile(re.escape(leader) + r"-\d+")
    return lambda name: worker.fullmatch(name) is not None


class _State(msgspec.Struct):
    """The part of ``/state`` that is read."""

    assessment: Assessment


class GroupMembers:
    """The pods of a group beside its leader, in a thread of their own."""

    def __init__(self, pages: GroupPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._newest: dict[str, tuple[float, Assessment | None]] = {}
        self._thread = threading.Thread(target=self._run, name="group-members", daemon=True)

    def start(self) -> None:
        """Begin to ask, in a thread that ends with the process."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._ending.set()

    def assessments(self) -> dict[str, Assessment | None]:
        """Return the newest assessment of each pod that was seen; None if it says nothing now."""
        now = self._clock()
        with self._lock:
            return {
                pod: found if now - at < STALE_S else None
                for pod, (at, found) in self._newest.items()
            }

    def _run(self) -> None:
        while not self._ending.is_set():
            self.ask()
            self._ending.wait(POLL_S)

    def ask(self) -> None:
        """One round; never raises."""
        try:
            members = self._pages.pods()
        except KubeError as error:
            self._pages.note("endpoints", str(error))
            return
        self._pages.note("endpoints", "")
        for pod, address in members.items():
            found = self._pages.page(pod, address, _assessment)
            if found is not None:
                with self._lock:
                    self._newest[pod] = (self._clock(), found)
        with self._lock:
            for gone in set(self._newest) - set(members):
                self._newest[gone] = (float("-inf"), None)
            while len(self._newest) > MAX_PODS:
                del self._newest[min(self._newest, key=lambda pod: self._newest[pod][0])]


def _assessment(page: bytes) -> Assessment:
    return bounded(decode(page, _State).assessment)


def bounded(theirs: Assessment) -> Assessment:
    """``theirs``, cut to what a supervisor would say. Malformed for sizes that no pod has."""
    sizes = [one.bytes for one in theirs.suspicions]
    for budget in (theirs.host, theirs.device, theirs.reserved):
        sizes += _sizes(budget)
    if any(abs(size) > MAX_BYTES for size in sizes):
        raise Malformed("assessment: a size is larger than any pod's memory")
    kept = [_plain(one) for one in theirs.suspicions[:MAX_EVIDENCE]]
    return msgspec.structs.replace(theirs, suspicions=kept, segments={})


def _plain(suspicion: Suspicion) -> Suspicion:
    return msgspec.structs.replace(
        suspicion,
        process=suspicion.process[:MAX_TEXT] if suspicion.process else None,
        unconfirmed=suspicion.unconfirmed[:MAX_TEXT] if suspicion.unconfirmed else None,
        confidence=min(1.0, max(0.0, suspicion.confidence)),
        evidence=[text[:MAX_TEXT] for text in suspicion.evidence[:MAX_EVIDENCE]],
        trigger=None,
    )


def _sizes(budget: BudgetState | None) -> list[int]:
    if budget is None:
        return []
    found = (budget.current, budget.baseline, budget.explained, budget.unexplained)
    return [size for size in found if size is not None]
