"""Read the state of other pods: the members of a multi-node group, and the other replicas.

Any program in these pods can serve such a page, so reads are bounded. A forged page can only make
the leader restart its own group.
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

from plimsoll_api import learned, pod_devices
from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.learned import MAX_LEARNED_BYTES, LearnedWorkload
from plimsoll_api.names import METRICS_PORT
from plimsoll_api.pod_devices import MAX_POD_DEVICES_BYTES
from plimsoll_api.workloads import RAY_KIND, WorkloadRef
from plimsoll_sidecar.background import BackgroundThread
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.clients.kube import EndpointSlices, KubeError
from plimsoll_sidecar.signals.sampler import WORKING_STATES

log = logging.getLogger(__name__)
Page = TypeVar("Page", bound=msgspec.Struct)

# Pause between two rounds of requests.
POLL_PERIOD_S = 5.0
PAGE_TIMEOUT_S = 2.0
MAX_PODS = 64
# If no pod answers, a round takes MAX_PODS / MAX_CONCURRENT_REQUESTS * PAGE_TIMEOUT_S seconds.
MAX_CONCURRENT_REQUESTS = 16
# Healthy pods answer again after the longest round and POLL_PERIOD_S, which is less.
MAX_PAGE_AGE_S = 20.0
MAX_STATE_BYTES = 1 << 20
# A text from another pod is cut to this length.
MAX_TEXT_CHARS = 200
# The suspicions of a pod and the evidence of a suspicion are cut to this number.
MAX_EVIDENCE_LINES = 8
# An endpoint may be absent for a moment while its pod exists, for example between two slices.
MIN_ABSENCE_S = 60.0
# Exceeds the memory of any pod.
MAX_MEMORY_BYTES = 1 << 60
# Polling stops if GroupLeader.is_serving has not been called for this time.
POLLING_IDLE_TIMEOUT_S = 10.0
# At first, the leader may not have noticed that its group restarts.
MIN_LEADER_READY_S = 10.0
# Nothing else marks KubeRay's head pods in the Service.
_HEAD_POD_PATTERN = re.compile(r".*-head(-.*)?")


def make_worker_matcher(workload_kind: str, leader_pod: str) -> Callable[[str], bool]:
    """Return a function that reports whether a pod is a worker of ``leader_pod``, by its name.

    The headless Service of a LeaderWorkerSet lists the pods of all its groups.
    """
    if workload_kind == RAY_KIND:
        return lambda name: name not in ("", leader_pod)
    worker = re.compile(re.escape(leader_pod) + r"-\d+")
    return lambda name: worker.fullmatch(name) is not None


def make_leader_matcher(workload_kind: str, worker_pod: str) -> Callable[[str], bool]:
    """Return a function that reports whether a pod is the leader of ``worker_pod``."""
    if workload_kind == RAY_KIND:
        return lambda name: _HEAD_POD_PATTERN.fullmatch(name) is not None
    leader, _, _ = worker_pod.rpartition("-")
    return lambda name: name == leader


class GroupPages:
    """Reads the ``/state`` pages of the pods of a group.

    ``subdomain`` is the name of the group's headless Service. ``is_wanted`` selects pods by name.
    """

    def __init__(
        self,
        slices: EndpointSlices,
        subdomain: str,
        is_wanted: Callable[[str], bool],
        port: int = METRICS_PORT,
    ) -> None:
        self._slices, self._subdomain, self._is_wanted = slices, subdomain, is_wanted
        self._port = port
        self._errors: dict[str, str] = {}
        self._queried: set[str] = set()

    def list_pods(self) -> dict[str, str] | None:
        """Return the addresses of the selected pods by name; None without the API server."""
        addresses: dict[str, str] = {}
        try:
            for endpoint in self._slices.iterate_endpoints([self._subdomain]):
                if (
                    len(addresses) < MAX_PODS
                    and self._is_wanted(endpoint.pod)
                    and _is_address(endpoint.address)
                ):
                    addresses.setdefault(endpoint.pod, endpoint.address)
        except KubeError as error:
            self.log_error_once("endpoints", str(error))
            return None
        self.log_error_once("endpoints", "")
        return addresses

    def read_pages(self, pods: Mapping[str, str], page_type: type[Page]) -> dict[str, Page]:
        """Return the page of each pod that answers, by pod name, and log the errors."""
        self._errors = {
            source: error
            for source, error in self._errors.items()
            if source not in self._queried or source in pods
        }
        self._queried = set(pods)
        if not pods:
            return {}
        with ThreadPoolExecutor(min(MAX_CONCURRENT_REQUESTS, len(pods)), "group-page") as asking:
            pages = asking.map(lambda pod: self._read_page(pod, pods[pod], page_type), pods)
            return {pod: page for pod, page in zip(pods, pages, strict=True) if page is not None}

    def _read_page(self, pod: str, address: str, page_type: type[Page]) -> Page | None:
        host = f"[{address}]" if ":" in address else address
        server = HttpClient(f"http://{host}:{self._port}")
        try:
            status, body = server.call("GET", "/state", PAGE_TIMEOUT_S, max_bytes=MAX_STATE_BYTES)
            if status != 200:
                raise EngineError(f"GET /state returned HTTP {status}")
            page = decode(body, page_type)
        except (EngineError, MalformedError) as error:
            self.log_error_once(pod, str(error))
            return None
        self.log_error_once(pod, "")
        return page

    def log_error_once(self, source: str, error: str) -> None:
        """Log ``error`` when it first occurs, and its end when ``error`` is empty."""
        before = self._errors.get(source, "")
        self._errors[source] = error
        if error and not before:
            log.warning(
                "failed to read from %s for the multi-node group: %s",
                source,
                error[:MAX_TEXT_CHARS],
            )
        elif before and not error:
            log.info("reading from %s for the multi-node group works again", source)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class _MemberState(msgspec.Struct):
    assessment: Assessment

    def __post_init__(self) -> None:
        sizes = [suspicion.bytes for suspicion in self.assessment.suspicions]
        for budget in (self.assessment.host, self.assessment.device, self.assessment.reserved):
            sizes += _list_budget_sizes(budget)
        if any(abs(size) > MAX_MEMORY_BYTES for size in sizes):
            raise ValueError("a size is larger than the maximum for a pod")


class GroupMembers:
    """Polls the assessments of all pods of a group except its leader, in a thread."""

    def __init__(self, pages: GroupPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._lock = threading.Lock()
        self._newest: dict[str, tuple[float, Assessment | None]] = {}
        self._last_listed: dict[str, float] = {}
        self._first_list_at: float | None = None
        self._newest_list_at = 0.0
        self._part = BackgroundThread("group-members", self._poll_and_wait)

    def start(self) -> None:
        """Start polling, in a thread that ends with the process."""
        self._part.start()

    def stop(self) -> None:
        """Stop polling."""
        self._part.stop()

    def read_assessments(self) -> dict[str, Assessment | None]:
        """Return the newest assessment by pod name; None if it is too old."""
        now = self._clock()
        with self._lock:
            return {
                pod: assessment if now - at < MAX_PAGE_AGE_S else None
                for pod, (at, assessment) in self._newest.items()
            }

    def is_gone(self, pod: str) -> bool:
        """Report whether the API server has not listed ``pod`` for :data:`MIN_ABSENCE_S`."""
        with self._lock:
            since = self._last_listed.get(pod, self._first_list_at)
            return since is not None and self._newest_list_at - since >= MIN_ABSENCE_S

    def _poll_and_wait(self) -> float:
        self.poll()
        return POLL_PERIOD_S

    def poll(self) -> None:
        """Poll all pods once, and log the errors of the API server and of the pods."""
        members = self._pages.list_pods()
        if members is None:
            return
        states = self._pages.read_pages(members, _MemberState)
        now = self._clock()
        with self._lock:
            for pod, state in states.items():
                self._newest[pod] = (now, truncate_assessment(state.assessment))
            self._note_list(members, now)
            for gone in set(self._newest) - set(members):
                self._newest[gone] = (float("-inf"), None)
            while len(self._newest) > MAX_PODS:
                del self._newest[min(self._newest, key=lambda pod: self._newest[pod][0])]

    def _note_list(self, members: Mapping[str, str], now: float) -> None:
        if len(members) >= MAX_PODS:  # the list may lack pods
            self._first_list_at = None
            self._last_listed.clear()
            return
        if self._first_list_at is None:
            self._first_list_at = now
        self._newest_list_at = now
        self._last_listed |= dict.fromkeys(members, now)
        while len(self._last_listed) > 2 * MAX_PODS:
            del self._last_listed[min(self._last_listed, key=self._last_listed.__getitem__)]


def truncate_assessment(assessment: Assessment) -> Assessment:
    """Return another pod's assessment, cut to the maximum size of an assessment of this pod."""
    suspicions = [
        _truncate_suspicion(suspicion) for suspicion in assessment.suspicions[:MAX_EVIDENCE_LINES]
    ]
    return msgspec.structs.replace(assessment, suspicions=suspicions, segments={})


def _truncate_suspicion(suspicion: Suspicion) -> Suspicion:
    return msgspec.structs.replace(
        suspicion,
        process=suspicion.process[:MAX_TEXT_CHARS] if suspicion.process else None,
        unconfirmed=suspicion.unconfirmed[:MAX_TEXT_CHARS] if suspicion.unconfirmed else None,
        unhealthy_device=(suspicion.unhealthy_device or "")[:MAX_TEXT_CHARS] or None,
        confidence=min(1.0, max(0.0, suspicion.confidence)),
        evidence=[text[:MAX_TEXT_CHARS] for text in suspicion.evidence[:MAX_EVIDENCE_LINES]],
        trigger=None,
    )


def _list_budget_sizes(budget: BudgetState | None) -> list[int]:
    if budget is None:
        return []
    sizes = (budget.current, budget.baseline, budget.explained, budget.unexplained)
    return [size for size in sizes if size is not None]


class _LeaderState(msgspec.Struct):
    engine_state: EngineState | None = None


class GroupLeader:
    """Polls the leader of a worker's group in a thread, while :meth:`is_serving` is called."""

    def __init__(self, pages: GroupPages, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages, self._clock = pages, clock
        self._last_call = float("-inf")
        self._ready_since: float | None = None
        self._part: BackgroundThread | None = None

    def is_serving(self) -> bool:
        """Report whether the leader has been ready for :data:`MIN_LEADER_READY_S`. Never blocks."""
        idle, self._last_call = self._is_idle, self._clock()
        if self._part is None:
            thread = BackgroundThread("group-leader", self._poll_and_wait)
            self._part = thread if thread.try_start() else None
        elif idle:
            self._part.wake()
        return self.measure_ready_s() >= MIN_LEADER_READY_S

    def measure_ready_s(self) -> float:
        """Return the seconds since the leader became ready; negative infinity if it is not."""
        since = self._ready_since
        return float("-inf") if since is None else self._clock() - since

    @property
    def _is_idle(self) -> bool:
        return self._clock() - self._last_call > POLLING_IDLE_TIMEOUT_S

    def _poll_and_wait(self) -> float | None:
        if self._is_idle:
            self._ready_since = None
            return None
        self.poll()
        return POLL_PERIOD_S

    def poll(self) -> None:
        """Poll the leader once. A leader that does not answer counts as not ready."""
        leaders = self._pages.list_pods()
        if leaders is not None:
            self._pages.log_error_once(
                "leader",
                "" if leaders else "the Service of the group has no endpoint for the leader",
            )
        pages = self._pages.read_pages(leaders or {}, _LeaderState)
        if not any(page.engine_state in WORKING_STATES for page in pages.values()):
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = self._clock()


class LearnedFile:
    """File in which the operator stores what the replicas have learned about their growth."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, workload: WorkloadRef | None) -> LearnedWorkload | None:
        """Return what the pods of ``workload`` have learned; None if unknown. Never raises."""
        name = str(workload) if workload is not None else ""
        try:
            workloads = learned.decode_learned_workloads(_read_file(self._path, MAX_LEARNED_BYTES))
        except MalformedError:
            return None
        return next(
            (
                learned_workload
                for learned_workload in workloads
                if learned_workload.workload == name
            ),
            None,
        )


class PodDevicesFile:
    """File in which the operator publishes the devices of pods."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key

    def read(self) -> tuple[str, ...]:
        """Return the devices of this pod; empty without valid data. Never raises."""
        data = _read_file(self._path, MAX_POD_DEVICES_BYTES)
        try:
            return pod_devices.decode_pod_devices(data).get(self._key, ()) if data else ()
        except MalformedError:
            return ()


def _read_file(path: Path, max_bytes: int) -> bytes:
    # One more byte shows the decoder that the file is too large.
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError:
        return b""
