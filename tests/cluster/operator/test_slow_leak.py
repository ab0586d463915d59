"""A replica leaks slowly: the condition says so, and what is left; nothing is restarted for it."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from leaklab.series import GIB, HOUR, MIB, Series, steady
from plimsoll_api.fleet_row import make_service_row
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.names import METRICS_PORT
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.record.metrics import Metrics
from tests.cluster.operator.conftest import WAIT_S
from tests.cluster.operator.test_lifecycle import own_address

POLICY = MemoryPolicy(host=MemoryBudget(512 * MIB, limit_bytes=6 * GIB), warmup_s=60.0)
INTERVAL_S = 60.0
NEXT_S = DEFAULT_INTERVALS.publish + WAIT_S
"""The operator publishes the first figures at once, the next ones a minute later."""


@dataclass
class Replica:
    """A supervisor's endpoint; ``page`` is what it answers."""

    address: str
    page: bytes = b""


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica(own_address())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(made.page)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer((made.address, METRICS_PORT), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def page_after(hours: float, rate: float) -> bytes:
    """What a supervisor shows of an engine that grew for so many hours of virtual time."""
    detector, metrics = Detector(POLICY, 60.0, INTERVAL_S), Metrics()
    series = Series(duration=hours * HOUR, interval=INTERVAL_S, leak=steady(rate / HOUR))
    for sample in series.samples():
        assessment = detector.update(sample)
    assert not assessment.suspicions
    metrics.observe(assessment, {}, 0.0)
    metrics.export_status(num_open_incidents=0, restarts_left=3, num_unpublished=0)
    return metrics.render()


def test_a_slow_leak_is_a_condition_until_the_engine_is_new(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    replica: Replica,
) -> None:
    replica.page = page_after(12, 0)
    start()
    kubectl.apply(manifest)
    (pod,) = eventually(lambda: kubectl.list("pods", "plimsoll.dev/service=tiny"))
    kubectl.play_kubelet("tiny", replica.address)
    eventually(lambda: kubectl.holds("tiny", SlowLeak="NoSlowLeak", Ready="True"))

    replica.page = page_after(30, 4 * MIB)
    eventually(lambda: kubectl.holds("tiny", SlowLeak="MemoryKeepsGrowing"), NEXT_S)
    condition = kubectl.condition("tiny", "SlowLeak")
    assert condition["status"] == "True"
    where = re.escape(f"{pod['metadata']['name']}: host memory (malloc_in_use)")
    wanted = (
        rf"{where} grows by (3\.9|4\.0|4\.1) MiB an hour and reaches its limit in about 4\d days"
    )
    assert re.fullmatch(wanted, condition["message"])
    assert make_service_row(kubectl.get("plinf", "tiny")).state == "SlowLeak"
    assert kubectl.holds("tiny", Ready="True", MemoryWithinBudget="WithinBudget")
    assert kubectl.get("plinf", "tiny")["status"]["openIncidents"] == 0
    (same,) = kubectl.list("pods", "plimsoll.dev/service=tiny")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]

    replica.page = page_after(1, 0)
    eventually(lambda: kubectl.holds("tiny", SlowLeak="InsufficientData"), NEXT_S)
