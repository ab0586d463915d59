"""A worker reads the requests that it takes over before it captures a graph or reports.

Tests ``worker/main.py``.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.worker.main import Worker

ARRIVES_S = 0.01
"""What the frontend needs to submit requests to a worker that is ready."""


class Channel:
    """Brings one message after :data:`ARRIVES_S`, and the end with the next look."""

    is_full = False

    def __init__(self, did: list[str]) -> None:
        self._did = did
        self._arrives = time.monotonic() + ARRIVES_S
        self._coming: list[worker_ipc.ToWorker] = [
            worker_ipc.CarryOverComplete("carried"), worker_ipc.Stop(False)
        ]  # fmt: skip

    def receive(self, timeout_s: float) -> list[worker_ipc.ToWorker]:
        time.sleep(min(timeout_s, max(0.0, self._arrives - time.monotonic())))
        return [self._coming.pop(0)] if self.is_readable() else []

    def is_readable(self) -> bool:
        return time.monotonic() >= self._arrives

    def send(self, message: Any) -> None:
        self._did.append(type(message).__name__)


def test_requests_come_before_the_first_graph_and_the_first_report(monkeypatch: Any) -> None:
    did: list[str] = []

    def capture() -> bool:
        did.append("capture")
        return True

    engine = SimpleNamespace(
        has_work=False, is_transferring=False, poll=lambda is_idle: None,
        capture_next_graph=capture, release_unclaimed_tables=lambda: None,
    )  # fmt: skip
    lifecycle: Any = SimpleNamespace(engine=engine, member=SimpleNamespace(leader=None))
    hooks: Any = SimpleNamespace(should_drop=lambda message: False, tick=lambda: None)
    channel: Any = Channel(did)
    monkeypatch.setattr(Worker, "_create_report", lambda self: SimpleNamespace())
    monkeypatch.setattr(Worker, "_shut_down", lambda self: None)
    Worker(lifecycle, channel, hooks).serve()
    assert did[0] == "AdoptionResult"
