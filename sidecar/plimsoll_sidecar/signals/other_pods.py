"""What is known of other pods: those of a multi-node group, and the other replicas.

Pods of a group are read by the ``/state`` pages of their supervisors.

The leader's supervisor reads the newest assessment of each worker. A worker's own processes do not
show when they have loaded their part of the model, which may take many minutes. So its warm-up
begins when the leader's page says that the leader's engine is ready.

The group's headless Service lists its pods. Any program in them can write such a page, so reads are
bounded. A forged page can make the leader restart its own group, and nothing else.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from plimsoll_api import peers
from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.names import METRICS_PORT
from plimsoll_api.peers import MAX_PEERS_BYTES, Peer
from plimsoll_api.workloads import RAY_KIND
from plimsoll_sidecar.background import Part
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.clients.kube import EndpointSlices, KubeError
from plimsoll_sidecar.signals.sampler import WORKING

log = logging.getLogger(__name__)
Page = TypeVar("Page", bound=msgspec.Struct)

POLL_S = 5.0
ANSWER_S = 2.0
MAX_PODS = 64
AT_ONCE = 16
"""Pods asked at a time, so that a round ends within ``MAX_PODS / AT_ONCE * ANSWER_S`` seconds even
if every pod is silent."""
STALE_S = 20.0
"""An older answer says nothing about now. That of a healthy pod is renewed sooner: after the
longest round and :data:`POLL_S`."""
MAX_STATE_BYTES = 1 << 20
MAX_ANSWER_TEXT = 200
MAX_EVIDENCE = 8
MAX_BYTES = 1 << 60
"""More memory than a pod can have."""
ASKED_S = 10.0
"""Stop polling after this long without a call to ``serves``."""
SURE_S = 10.0
"""How long the leader must have been ready: it may not have seen yet that its group restarts."""
FRESH_S = 300.0
"""The operator writes once a minute, and a kubelet takes up to a minute and a half to follow."""
_HEAD = re.compile(r".*-head(-.*)?")
"""KubeRay's names of head pods: nothing else in a RayCluster's Service tells them apart."""


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


def leader_of(kind: str, worker: str) -> Callable[[str], bool]:
    """Return what says by a pod's name whether it leads ``worker``, in a workload of this kind."""
    if kind == RAY_KIND:
        return lambda name: _HEAD.fullmatch(name) is not None
    leader, _, _ = worker.rpartition("-")
    return lambda name: name == leader


class GroupPages:
    """The pods that the Service ``subdomain`` lists and whose names ``wanted`` accepts."""

    def __init__(
        self,
        slices: EndpointSlices,
        subdomain: str,
        wanted: Callable[[str], bool],
        port: int = METRICS_PORT,
    ) -> None:
        self._slices, self._subdomain, self._wanted = slices, subdomain, wanted
        self._port = port
        self._trouble: dict[str, str] = {}
        self._asked: set[str] = set()

    def pods(self) -> dict[str, str] | None:
        """Name and address of each, at most :data:`MAX_PODS`; None, logged, if they are unknown."""
        found: dict[str, str] = {}
        try:
            for one in self._slices.of([self._subdomain]):
                if len(found) < MAX_PODS and self._wanted(one.pod) and _is_address(one.address):
                    found.setdefault(one.pod, one.address)
        except KubeError as error:
            self.note("endpoints", str(error))
            return None
        self.note("endpoints", "")
        return found

    def pages(self, pods: Mapping[str, str], kind: type[Page]) -> dict[str, Page]:
        """Return the pages of those that have one, by pod; the others are logged."""
        self._trouble = {
            what: one
            for what, one in self._trouble.items()
            if what not in self._asked or what in pods
        }
        self._asked = set(pods)
        if not pods:
            return {}
        with ThreadPoolExecutor(min(AT_ONCE, len(pods)), "group-page") as asking:
            found = asking.map(lambda pod: self._page(pod, pods[pod], kind), pods)
            return {pod: page for pod, page in zip(pods, found, strict=True) if page is not None}

    def _page(self, pod: str, address: str, kind: type[Page]) -> Page | None:
        host = f"[{address}]" if ":" in address else address
        server = HttpClient(f"http://{host}:{self._port}")
        try:
            status, body = server.call("GET", "/state", ANSWER_S, max_bytes=MAX_STATE_BYTES)
            if status != 200:
                raise EngineError(f"HTTP {status}")
            found = decode(body, kind)
        except (EngineError, Malformed) as error:
            self.note(pod, str(error))
            return None
        self.note(pod, "")
        return found

    def note(self, what: str, trouble: str) -> None:
        """Log the beginning and the end of trouble, once each."""
        before = self._trouble.get(what, "")
        self._trouble[what] = trouble
        if trouble and not before:
            log.warning("%s of the group cannot be read: %s", what, trouble[:MAX_ANSWER_TEXT])
        elif before and not trouble:
            log.info("%s of the group can be read again", what)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class _MemberState(msgspec.Struct):
    """The part of a worker's ``/state`` that is read."""

    assessment: Assessment

    def __post_init__(self) -> None:
        sizes = [one.bytes for one in self.assessment.suspicions]
        for budget in (self.assessment.host, self.assessment.device, self.assessment.reserved):
            sizes += _sizes(budget)
        if any(abs(size) > MAX_BYTES for size in sizes):
            raise ValueError("a size is larger than any pod's memory")


class GroupMembers:
    """The pods of a group other than its leader, asked in a thread."""

    def __init__(self, pages: GroupPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._lock = threading.Lock()
        self._newest: dict[str, tuple[float, Assessment | None]] = {}
        self._part = Part("group-members", self._turn)

    def start(self) -> None:
        """Begin to ask, in a thread that ends with the process."""
        self._part.start()

    def stop(self) -> None:
        """Ask no more."""
        self._part.stop()

    def assessments(self) -> dict[str, Assessment | None]:
        """Return the newest assessment of each pod that was seen; None if it says nothing now."""
        now = self._clock()
        with self._lock:
            return {
                pod: found if now - at < STALE_S else None
                for pod, (at, found) in self._newest.items()
            }

    def _turn(self) -> float:
        self.ask()
        return POLL_S

    def ask(self) -> None:
        """One round; never raises for what the API server or a pod answers."""
        members = self._pages.pods()
        if members is None:
            return
        found = self._pages.pages(members, _MemberState)
        now = self._clock()
        with self._lock:
            for pod, state in found.items():
                self._newest[pod] = (now, shortened(state.assessment))
            for gone in set(self._newest) - set(members):
                self._newest[gone] = (float("-inf"), None)
            while len(self._newest) > MAX_PODS:
                del self._newest[min(self._newest, key=lambda pod: self._newest[pod][0])]


def shortened(theirs: Assessment) -> Assessment:
    """``theirs``, cut to what a supervisor would say."""
    kept = [_plain(one) for one in theirs.suspicions[:MAX_EVIDENCE]]
    return msgspec.structs.replace(theirs, suspicions=kept, segments={})


def _plain(suspicion: Suspicion) -> Suspicion:
    return msgspec.structs.replace(
        suspicion,
        process=suspicion.process[:MAX_ANSWER_TEXT] if suspicion.process else None,
        unconfirmed=suspicion.unconfirmed[:MAX_ANSWER_TEXT] if suspicion.unconfirmed else None,
        confidence=min(1.0, max(0.0, suspicion.confidence)),
        evidence=[text[:MAX_ANSWER_TEXT] for text in suspicion.evidence[:MAX_EVIDENCE]],
        trigger=None,
    )


def _sizes(budget: BudgetState | None) -> list[int]:
    if budget is None:
        return []
    found = (budget.current, budget.baseline, budget.explained, budget.unexplained)
    return [size for size in found if size is not None]


class _LeaderState(msgspec.Struct):
    """The part of the leader's ``/state`` that is read."""

    engine_state: EngineState | None = None


class GroupLeader:
    """The pod that leads a worker's group, asked in a thread while :meth:`serves` is called."""

    def __init__(self, pages: GroupPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._asked_at = float("-inf")
        self._ready_since: float | None = None
        self._part: Part | None = None

    def serves(self) -> bool:
        """Return whether the leader's engine has been ready for :data:`SURE_S`; never waits."""
        idle, self._asked_at = self._idle, self._clock()
        if self._part is None:
            self._part = Part("group-leader", self._turn)
            self._part.start()
        elif idle:
            self._part.wake()
        return self.ready_for() >= SURE_S

    def ready_for(self) -> float:
        """Return for how many seconds each answer was that it is ready; less than 0 for none."""
        since = self._ready_since
        return float("-inf") if since is None else self._clock() - since

    @property
    def _idle(self) -> bool:
        return self._clock() - self._asked_at > ASKED_S

    def _turn(self) -> float | None:
        if self._idle:
            self._ready_since = None
            return None
        self.look()
        return POLL_S

    def look(self) -> None:
        """Ask the leader once. One that cannot be asked is not known to be ready."""
        leaders = self._pages.pods()
        if leaders is not None:
            self._pages.note("leader", "" if leaders else "it is not among the endpoints")
        pages = self._pages.pages(leaders or {}, _LeaderState)
        if not any(page.engine_state in WORKING for page in pages.values()):
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = self._clock()


class PeersFile:
    """What the operator published of the other replicas, while it is known to be recent.

    A kubelet writes the file some time after the operator did, and leaves it as it is when the
    operator is away. Clocks of two machines are never compared: a file is recent while it changes.
    One that is there at the start may be of any age, so it counts from its first change on.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._data = self._read()
        self._until = float("-inf")
        self._peers: tuple[Peer, ...] = ()

    def peers(self) -> tuple[Peer, ...]:
        """Look at the file again; empty while nothing recent is known. Never raises."""
        now, data = self._clock(), self._read()
        if data != self._data:
            self._data, self._until = data, now + FRESH_S
            try:
                self._peers = peers.decode(data)
            except Malformed:
                self._peers = ()
        return self._peers if now < self._until else ()

    def _read(self) -> bytes:
        """Return the file's content, one byte beyond the bound at most; empty without a file."""
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_PEERS_BYTES + 1)
        except OSError:
            return b""
