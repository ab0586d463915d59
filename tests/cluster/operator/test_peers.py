"""One replica of three may leak: the growth of all reaches their supervisors' configuration."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.names import METRICS_PORT, make_policy_object_name
from plimsoll_api.peers import PEERS_FILE, decode_peers
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_sidecar.detect.fleet import add_peer_evidence
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.other_pods import PeersFile
from tests.cluster.operator.test_adopt import LISTED_S
from tests.cluster.operator.test_fleet_safety import SELECTOR, leaking
from tests.cluster.operator.test_lifecycle import own_address
from tests.cluster.operator.test_policy_fleet import leaking as leaking_in_policy
from tests.cluster.operator.test_policy_fleet import pods, policy, workload

MIB = 1 << 20


@contextlib.contextmanager
def supervisors(page: Callable[[], Metrics]) -> Iterator[str]:
    """The address of a machine whose supervisors answer with ``page``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page().render())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer((own_address(), METRICS_PORT), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield own_address()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def address() -> Iterator[str]:
    """A machine whose supervisors have grown by 101 MiB, 102 MiB, … after an hour of requests."""
    sizes = itertools.count(101)

    def page() -> Metrics:
        host = BudgetState(unexplained=next(sizes) * MIB, age_s=3600.0, requests=9_000)
        metrics = Metrics()
        metrics.observe(Assessment(t=1.0, epoch=1, warm=True, host=host), {}, 0.0)
        return metrics

    with supervisors(page) as found:
        yield found


def test_the_growth_of_all_replicas_reaches_the_one_that_is_suspected(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    address: str,
    tmp_path: Path,
) -> None:
    file = PeersFile(tmp_path / PEERS_FILE)
    start("--scrape=2")
    manifest["spec"] |= {"replicas": 3}
    kubectl.apply(manifest)
    eventually(lambda: len(kubectl.list("pods", SELECTOR)) == 3)
    kubectl.play_kubelet("tiny", address)
    eventually(lambda: kubectl.holds("tiny", Ready="True"))
    eventually(lambda: "restarts" in kubectl.get("plinf", "tiny")["status"])
    uids = {one["metadata"]["name"]: one["metadata"]["uid"] for one in pods_of(kubectl)}
    role = kubectl.get("role", "tiny-supervisor")["rules"]
    assert PEERS_FILE not in data(kubectl), "a quiet service has none"

    mine = min(uids)
    leaking(kubectl, "leak", mine)
    (tmp_path / PEERS_FILE).write_text(eventually(lambda: data(kubectl)[PEERS_FILE], 40))
    peers = file.read_peers()
    assert {one.pod for one in peers} == set(uids)
    assert len({one.revision for one in peers}) == 1
    sizes = {one.pod: one.host.bytes for one in peers if one.host}
    assert len(set(sizes.values())) == 3
    assert all(one.host and (one.host.age_s, one.host.requests) == (3600, 9000) for one in peers)

    suspicion = Suspicion(IncidentKind.HOST_GROWTH, None, 0.9, 0.2, bytes=sizes[mine])
    before = Assessment(t=1.0, epoch=1, warm=True, suspicions=[suspicion])
    (found,) = add_peer_evidence(before, mine, peers).suspicions
    assert "2 of 2 of its revision show the same growth" in found.evidence[0]
    assert found.confidence < 0.9

    kubectl.patch("leakincident", "leak", {"status": {"phase": "Resolved"}}, "status")
    eventually(lambda: PEERS_FILE not in data(kubectl))
    assert {one["metadata"]["name"]: one["metadata"]["uid"] for one in pods_of(kubectl)} == uids
    assert kubectl.get("role", "tiny-supervisor")["rules"] == role


def test_a_policy_compares_the_pods_of_one_workload(
    kubectl: Any, start: Callable[..., Any], eventually: Any, address: str
) -> None:
    start("--scrape=2")
    kubectl.apply(policy(), workload("vllm", 2), workload("other", 1))
    eventually(lambda: len(pods(kubectl, "vllm")) == 2 and pods(kubectl, "other"), LISTED_S)
    for name in (*pods(kubectl, "vllm"), *pods(kubectl, "other")):
        running = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        kubectl.patch("pod", name, {"status": running}, "status")
    leaking_in_policy(kubectl, pods(kubectl, "vllm")[0], "vllm", "Open")

    def published() -> set[tuple[str, str]]:
        made = kubectl.get("configmap", make_policy_object_name("engines"))
        text = "[]" if made is None else made["data"].get(PEERS_FILE, "[]")
        return {(one.pod, one.workload) for one in decode_peers(text.encode()) if one.host}

    wanted = {(name, "Deployment/vllm") for name in pods(kubectl, "vllm")}
    # A summary that was made before the pods had an address is a minute old until the next one.
    eventually(lambda: published() == wanted, DEFAULT_INTERVALS.publish + 2 * LISTED_S)


def pods_of(kubectl: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.list("pods", SELECTOR)
    return found


def data(kubectl: Any) -> dict[str, str]:
    found: dict[str, str] = kubectl.get("configmap", "tiny-supervisor")["data"]
    return found
