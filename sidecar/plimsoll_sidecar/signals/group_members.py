"""What the supervisors of the other pods of a multi-node group say: read by the leader's.

The group's headless Service lists its pods. Each of their supervisors shows its newest assessment
under ``/state``. Whatever runs in those pods can write such a page, so it is bounded: a false one
can make the leader restart its own group, and nothing else.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.names import METRICS_PORT
from plimsoll_api.workloads import RAY_KIND
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.clients.kube import KubeClient, KubeError, Object

log = logging.getLogger(__name__)

SERVICE_NAME = "kubernetes.io/service-name"
POLL_S = 5.0
ANSWER_S = 3.0
STALE_S = 20.0
"""An answer older than this says nothing of now."""
MAX_MEMBERS = 64
MAX_STATE_BYTES = 1 << 20
MAX_EVIDENCE, MAX_TEXT = 8, 200
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
    """The pods of a group beside its leader, in a thread of their own.

    They are those that the Service ``subdomain`` lists and whose names ``is_worker`` accepts.
    """

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        subdomain: str,
        is_worker: Callable[[str], bool],
        port: int = METRICS_PORT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._port, self._clock = kube, port, clock
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_NAME}={subdomain}"
        self._is_worker = is_worker
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._newest: dict[str, tuple[float, Assessment | None]] = {}
        self._trouble: dict[str, str] = {}
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
            slices = self._kube.get(self._path, labelSelector=self._selector).get("items") or []
        except KubeError as error:
            self._note("endpoints", str(error))
            return
        self._note("endpoints", "")
        members = dict(self._members(slices))
        for pod, address in members.items():
            found = self._ask(pod, address)
            if found is not None:
                with self._lock:
                    self._newest[pod] = (self._clock(), found)
        with self._lock:
            for gone in set(self._newest) - set(members):
                self._newest[gone] = (float("-inf"), None)
            while len(self._newest) > MAX_MEMBERS:
                del self._newest[min(self._newest, key=lambda pod: self._newest[pod][0])]

    def _members(self, slices: list[Object]) -> Iterator[tuple[str, str]]:
        """Name and address of the other pods of the group."""
        count = 0
        for piece in slices:
            for endpoint in piece.get("endpoints") or []:
                name = str((endpoint.get("targetRef") or {}).get("name", ""))
                address = next(iter(endpoint.get("addresses") or ()), "")
                if not self._is_worker(name) or not _is_address(address):
                    continue
                if (count := count + 1) > MAX_MEMBERS:
                    return
                yield name, address

    def _ask(self, pod: str, address: str) -> Assessment | None:
        host = f"[{address}]" if ":" in address else address
        try:
            status, body = HttpClient(f"http://{host}:{self._port}").call("GET", "/state", ANSWER_S)
            if status != 200 or len(body) > MAX_STATE_BYTES:
                raise EngineError(f"HTTP {status}, {len(body)} bytes")
            found = bounded(msgspec.json.decode(body, type=_State).assessment)
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._note(pod, str(error))
            return None
        self._note(pod, "")
        return found

    def _note(self, what: str, trouble: str) -> None:
        """Log trouble once, and its end."""
        before = self._trouble.get(what, "")
        self._trouble[what] = trouble
        if trouble and not before:
            log.warning("%s of the group cannot be read: %s", what, trouble[:MAX_TEXT])
        elif before and not trouble:
            log.info("%s of the group can be read again", what)


def bounded(theirs: Assessment) -> Assessment:
    """``theirs``, cut to what a supervisor would say. ValidationError for sizes that no pod has."""
    sizes = [one.bytes for one in theirs.suspicions]
    for budget in (theirs.host, theirs.device, theirs.reserved):
        sizes += _sizes(budget)
    if any(abs(size) > MAX_BYTES for size in sizes):
        raise msgspec.ValidationError("assessment: a size is larger than any pod's memory")
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


def _is_address(text: object) -> bool:
    try:
        ipaddress.ip_address(str(text))
    except ValueError:
        return False
    return True
