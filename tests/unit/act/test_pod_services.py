"""Which Services say whether a pod may leave.

Tests ``act/pod_services.py``.
"""

from __future__ import annotations

import threading
import time

import pytest

from plimsoll_sidecar.act import pod_services
from plimsoll_sidecar.act.adapters.engine_adapter import Arrivals
from plimsoll_sidecar.act.pod_services import (
    PodServices,
    ServiceExit,
    wait_for_last_arrival,
    wait_until_left,
)
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.clients.kube import KubeError
from tests.unit.clients.api_server import ApiServer, endpoint

HEAD = "llm-head"


def test_a_service_without_clients_says_nothing_of_who_is_left(api: ApiServer) -> None:
    api.add("front", [endpoint(HEAD)])
    api.add("group", [endpoint(HEAD), endpoint("stranger", serving=False)])
    assert PodServices(api.endpoint_slices, HEAD).is_last_ready()
    apart = PodServices(api.endpoint_slices, HEAD, unused_services=["group"])
    assert apart.read_readiness_by_service() == [{HEAD: True}]
    assert not apart.is_last_ready()


def test_a_planned_restart_needs_another_ready_replica_in_each_service(api: ApiServer) -> None:
    mine = PodServices(api.endpoint_slices, HEAD)
    assert not mine.is_last_ready()
    assert mine.is_last_ready(is_planned=True), "without a Service, nothing shows another replica"
    api.add("front", [endpoint(HEAD)])
    assert not mine.is_last_ready(), "the only replica may restart if it leaks"
    assert mine.is_last_ready(is_planned=True)
    api.add("front", [endpoint(HEAD), endpoint("other")])
    assert not mine.is_last_ready(is_planned=True)
    api.add("back", [endpoint(HEAD), endpoint("other", serving=False)])
    assert mine.is_last_ready(is_planned=True)
    assert ServiceExit().is_last_ready(is_planned=True), "unknown is not ready"


def test_a_wait_reads_the_namespace_once_and_then_the_pods_services_alone(api: ApiServer) -> None:
    """Reading a large namespace's slices every half second would exceed the supervisor's CPU."""
    for number in range(300):
        api.add(f"other-{number}", [endpoint(f"pod-{number}")])
    api.add("front", [endpoint(HEAD)])
    assert not PodServices(api.endpoint_slices, HEAD).wait_until_left(1.2)
    whole = [query for query in api.queries if "labelSelector" not in query]
    assert sum(int(query["limit"]) for query in whole) >= len(api.slices)
    assert len(whole) < 10
    assert all(int(query["limit"]) <= 64 for query in api.queries)
    selected = {query["labelSelector"] for query in api.queries if query not in whole}
    assert selected == {"kubernetes.io/service-name in (front)"}


def test_the_pods_of_an_inference_pool_need_no_service(api: ApiServer) -> None:
    """Nothing but the policy's own Service shows them, and no request comes through that one."""
    replicas = [(HEAD, "llm-worker"), ("other",)]
    mine = PodServices(
        api.endpoint_slices, HEAD, list_replicas=lambda: replicas, members_service="members"
    )
    assert mine.is_last_ready(is_planned=True), "the Service is not there yet"
    assert not mine.is_last_ready()
    api.add("members", [endpoint(HEAD), endpoint("other", serving=False), endpoint("decode")])
    assert mine.is_last_ready(), "the decode engine is no replica of this one"
    api.add("members", [endpoint(HEAD), endpoint("other"), endpoint("llm-worker", serving=False)])
    assert not mine.is_last_ready(is_planned=True)
    assert mine.read_readiness_by_service() == [], "nobody's requests go through it"
    api.add("front", [endpoint(HEAD), endpoint("other", serving=False)])
    assert mine.is_last_ready(), "a Service with clients decides"


def test_a_group_that_is_being_recreated_counts_as_not_ready(api: ApiServer) -> None:
    """Its leader has no endpoint: if the last ready group restarted then, none would serve."""
    expected = 2
    mine = PodServices(api.endpoint_slices, HEAD, "llm", read_expected_replicas=lambda: expected)
    api.add("llm", [endpoint(HEAD)])
    assert mine.is_last_ready()
    api.slices[0]["endpoints"] = [endpoint(HEAD), endpoint("other")]
    assert not mine.is_last_ready()
    expected = 3
    assert not mine.is_last_ready(), "one replica takes over"
    expected = 1
    api.slices[0]["endpoints"] = [endpoint(HEAD)]
    assert not mine.is_last_ready(), "the only replica may restart"


def test_only_partners_that_are_ready_are_asked(api: ApiServer) -> None:
    api.add("members", [endpoint("d-0"), endpoint("d-1", serving=False), endpoint(HEAD)])
    found = api.endpoint_slices.find_ready_addresses(("d-0", "d-1", "d-2"))
    assert list(found) == ["d-0"]


def test_a_pod_leaves_after_the_api_server_is_back(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile clients still reach it: a restart would fail their requests."""
    monkeypatch.setattr(pod_services, "UNKNOWN_ENDPOINTS_WAIT_S", 0.0)
    monkeypatch.setattr(pod_services, "MAX_WATCH_LAG_S", 0.5)
    api.add("front", [endpoint(HEAD)])
    api.answer = (503, {}, b"{}")
    has_left = threading.Event()

    def answer_again() -> None:
        api.answer = None

    def leave() -> None:
        has_left.set()
        api.slices[0]["endpoints"] = [endpoint(HEAD, serving=False)]

    timers = [threading.Timer(0.7, answer_again), threading.Timer(1.5, leave)]
    for timer in timers:
        timer.start()
    wait_until_left(PodServices(api.endpoint_slices, HEAD))
    assert has_left.is_set()
    for timer in timers:
        timer.join()


def test_kube_proxy_has_time_to_watch_again_after_an_outage(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notices later than the supervisor that the pod has left: a restart would fail requests."""
    monkeypatch.setattr(pod_services, "MAX_WATCH_LAG_S", 1.0)
    api.add("front", [endpoint(HEAD, serving=False)])
    services = PodServices(api.endpoint_slices, HEAD)
    assert waited(services) < 0.5, "there was no outage"
    api.answer = (503, {}, b"{}")
    with pytest.raises(KubeError):
        api.kube.get("/api")
    api.answer = None
    assert 0.9 < waited(services) < 1.5
    assert waited(services) < 0.5, "the outage is long past"


def test_endpoints_that_change_late_after_an_outage_are_waited_for(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_services, "LEAVE_SERVICES_TIMEOUT_S", 0.6)
    monkeypatch.setattr(pod_services, "MAX_WATCH_LAG_S", 2.0)
    api.add("front", [endpoint(HEAD)])
    services = PodServices(api.endpoint_slices, HEAD)
    assert waited(services) < 1.5, "there was no outage"
    api.answer = (503, {}, b"{}")
    with pytest.raises(KubeError):
        api.kube.get("/api")
    api.answer = None
    has_left = threading.Event()

    def leave() -> None:
        has_left.set()
        api.slices[0]["endpoints"] = [endpoint(HEAD, serving=False)]

    timer = threading.Timer(1.2, leave)
    timer.start()
    assert waited(services) > 1.2
    assert has_left.is_set()
    timer.join()


def test_an_outage_while_the_pod_waits_begins_the_wait_anew(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that starts then reports the pod as ready for a moment, and kube-proxy keeps it."""
    monkeypatch.setattr(pod_services, "ENDPOINTS_POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(pod_services, "MAX_WATCH_LAG_S", 1.0)
    api.add("front", [endpoint(HEAD, serving=False)])
    services = PodServices(api.endpoint_slices, HEAD)
    begin = time.monotonic()
    api.answer = (503, {}, b"{}")
    with pytest.raises(KubeError):
        api.kube.get("/api")
    api.answer = None

    def fail() -> None:
        api.slices[0]["endpoints"] = [endpoint(HEAD)]
        api.answer = (503, {}, b"{}")

    def start() -> None:
        """The first answers of an API server that has not read the roles yet."""
        api.answer = (403, {}, b"{}")

    def recover() -> None:
        api.slices[0]["endpoints"] = [endpoint(HEAD, serving=False)]
        api.answer = None

    events = {0.7: fail, 1.1: start, 1.3: recover}
    timers = [threading.Timer(after_s, event) for after_s, event in events.items()]
    for timer in timers:
        timer.start()
    wait_until_left(services)
    assert 2.0 < time.monotonic() - begin < 3.0
    for timer in timers:
        timer.join()


def test_outages_without_end_delay_a_restart_for_a_bounded_time(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_services, "MAX_LEAVE_SERVICES_S", 1.0)
    api.add("front", [endpoint(HEAD)])
    api.answer = (503, {}, b"{}")
    assert 0.9 < waited(PodServices(api.endpoint_slices, HEAD)) < 2.0


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_services, "ARRIVALS_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(pod_services, "MIN_QUIET_S", 0.05)
    monkeypatch.setattr(pod_services, "MAX_QUIET_S", 0.4)
    monkeypatch.setattr(pod_services, "MAX_WATCH_LAG_S", 1.0)


def time_arrivals(ended_after_s: float, each_s: float, total: int = 1000) -> float:
    """How long a pod waits at which a request arrives every ``each_s`` until ``ended_after_s``."""
    begin = time.monotonic()

    def read() -> Arrivals:
        spent_s = min(time.monotonic() - begin, ended_after_s)
        return Arrivals(total + int(spent_s / each_s), total * each_s)

    assert wait_for_last_arrival(read) == (ended_after_s < 1.0)
    return time.monotonic() - begin


@pytest.mark.usefixtures("fast")
def test_the_wait_ends_after_the_last_request_and_a_pause_that_suits_their_rate() -> None:
    assert 0.5 < time_arrivals(ended_after_s=0.5, each_s=0.02) < 0.9
    assert 0.5 < time_arrivals(ended_after_s=0.3, each_s=0.05) < 0.9
    assert 0.4 < time_arrivals(ended_after_s=0.0, each_s=10.0) < 0.7, "seldom: the longest pause"
    assert time_arrivals(ended_after_s=0.0, each_s=10.0, total=0) < 0.3, "nobody ever came"
    assert 1.0 <= time_arrivals(ended_after_s=9.0, each_s=0.02) < 1.3, "without end: bounded"


@pytest.mark.usefixtures("fast")
def test_an_engine_that_does_not_count_its_requests_does_not_delay_its_restart() -> None:
    def fail() -> Arrivals:
        raise EngineError("no answer")

    begin = time.monotonic()
    assert wait_for_last_arrival(lambda: None)
    assert wait_for_last_arrival(fail)
    answers = iter((Arrivals(7, 1.0), Arrivals(9, 2.0), Arrivals(0, 0.1)))
    assert wait_for_last_arrival(lambda: next(answers, Arrivals(0, 0.2))), "it started again"
    assert time.monotonic() - begin < 0.9


def waited(services: PodServices) -> float:
    """How long the pod waits until it has left."""
    begin = time.monotonic()
    wait_until_left(services)
    return time.monotonic() - begin
