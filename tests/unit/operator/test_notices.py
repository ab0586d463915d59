"""Events: one for each change, none at rest, and a repeated one is counted.

Tests ``status/events.py`` and ``controllers/writes.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plimsoll_operator.controllers.writes import (
    EVENT_DEDUPLICATION_S,
    MAX_CACHED_EVENTS,
    MAX_MESSAGE_CHARS,
    EventRecorder,
)
from plimsoll_operator.fleet.revisions import RolloutDecision
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.runtime.client import ApiError
from plimsoll_operator.status.events import (
    Notice,
    make_completion_notices,
    make_failure_notice,
    make_rollout_notices,
)

NOW = "2026-01-01T00:00:00Z"
SERVICE = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen", "namespace": "ml", "uid": "u-1"},
}


def deployment(revision: str, restart: str = "", paused: bool = False) -> dict[str, Any]:
    notes = {"plimsoll.dev/pod-hash": revision}
    notes |= {"plimsoll.dev/restart-id": restart} if restart else {}
    return {"metadata": {"annotations": notes}, "spec": {"paused": paused}}


OLD, NEW = deployment("old"), deployment("new")
BACK = RolloutDecision("old", action="RolledBack")


@pytest.mark.parametrize(
    ("live", "desired", "decision", "reasons"),
    [
        (None, NEW, RolloutDecision("new"), []),
        (None, deployment("new", "7"), RolloutDecision("new"), []),
        (OLD, NEW, RolloutDecision("new"), ["RolloutStarted"]),
        (NEW, NEW, RolloutDecision("new"), []),
        (
            OLD,
            deployment("new", "7"),
            RolloutDecision("new"),
            ["RestartRequested", "RolloutStarted"],
        ),
        (OLD, deployment("old", "7"), RolloutDecision("old"), []),  # noted by a newer operator
        (NEW, OLD, BACK, ["RollbackStarted"]),
        (OLD, OLD, BACK, []),
        (NEW, deployment("new", "", True), RolloutDecision("new", True, "Held"), ["RolloutHeld"]),
        (deployment("new", "", True), NEW, RolloutDecision("new"), ["RolloutResumed"]),
    ],
)
def test_what_an_applied_deployment_means(
    live: Any, desired: Any, decision: RolloutDecision, reasons: list[str]
) -> None:
    assert [one.reason for one in make_rollout_notices(live, desired, decision)] == reasons


def test_a_roll_back_for_a_leak_is_a_warning_and_one_on_request_is_not() -> None:
    asked = RolloutDecision("old", action="RolledBack", requested=True)
    assert [make_rollout_notices(NEW, OLD, one)[0].type for one in (BACK, asked)] == [
        "Warning",
        "Normal",
    ]


def test_the_end_of_a_roll_out_is_one_event() -> None:
    under_way = {"revisions": {"update": "new", "current": "old"}}
    done = {"revisions": {"update": "new", "current": "new"}}
    assert [one.reason for one in make_completion_notices(under_way, done)] == ["RolloutFinished"]
    assert make_completion_notices(done, done) == make_completion_notices({}, {}) == []
    assert [one.reason for one in make_completion_notices(done, under_way)] == ["RollbackFinished"]


class Server:
    """Keeps what is applied; refuses where it is told to."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.refuses = False

    async def apply(self, _kind: Any, item: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise ApiError(403, "Forbidden", "the namespace is being terminated")
        self.events.append(item)
        return item


def test_a_refusal_that_repeats_is_counted_and_seldom_written() -> None:
    server, time = Server(), [0]
    recorder = EventRecorder(server, lambda: f"2026-01-01T00:{time[0]:02}:00Z")  # type: ignore[arg-type]
    notice = make_failure_notice(
        Failure("ApplyFailed", "admission webhook denied the request", True)
    )

    async def repeat() -> None:
        for minute in range(30):
            time[0] = minute
            await recorder.write(SERVICE, [notice])

    asyncio.run(repeat())
    assert [one["count"] for one in server.events] == [1, 11, 21]
    assert len({one["metadata"]["name"] for one in server.events}) == 1, "it is one Event"
    assert server.events[-1]["firstTimestamp"] == NOW
    assert EVENT_DEDUPLICATION_S == 600


def test_what_is_remembered_and_what_is_written_is_bounded() -> None:
    server = Server()
    recorder = EventRecorder(server, lambda: NOW)  # type: ignore[arg-type]

    async def flood() -> None:
        for index in range(MAX_CACHED_EVENTS + 10):
            await recorder.write(SERVICE, [Notice("ApplyFailed", f"{index} " + "x" * 5000)])

    asyncio.run(flood())
    assert len(recorder._known) == MAX_CACHED_EVENTS
    assert max(len(one["message"]) for one in server.events) <= MAX_MESSAGE_CHARS


def test_an_event_that_is_refused_hurts_nobody() -> None:
    server = Server()
    server.refuses = True
    recorder = EventRecorder(server, lambda: NOW)  # type: ignore[arg-type]
    asyncio.run(recorder.write(SERVICE, [Notice("RolloutStarted", "x")]))
    server.refuses = False
    asyncio.run(recorder.write(SERVICE, [Notice("RolloutFinished", "y")]))
    assert [one["reason"] for one in server.events] == ["RolloutFinished"]
