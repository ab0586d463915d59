"""The thread that brings incidents to Kubernetes survives whatever one attempt meets."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.leakincident import MAX_STATUS_WRITES
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_sidecar import background
from plimsoll_sidecar.clients.kube import KubeClient, KubeError, Object
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.publisher import (
    NEVER_S,
    PublishedObject,
    Publisher,
    compute_publish_delay_s,
)
from tests.http_server import Handler, answering

DEEP = b'{"metadata":' + b"[" * 100_000


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """An API server's address, and the answers that it still gives before good ones."""
    bad: list[bytes] = []

    class Server(Handler):
        def do_PATCH(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = bad.pop() if bad else b'{"metadata": {"uid": "1"}, "spec": {"id": "pod-0-1"}}'
            self.answer(200, body)

        do_POST = do_PATCH

        def do_GET(self) -> None:
            self.send_error(404)

    with answering(Server) as port:
        yield f"http://127.0.0.1:{port}", bad


def test_a_token_that_is_no_text_and_answers_that_are_none_end_nothing(
    tmp_path: Path, server: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
    url, bad = server
    token = tmp_path / "token"
    token.write_bytes(b"\xff\xfe")
    bad += [DEEP, b'{"metadata": 5}', b"[]", b'{"metadata": null}']
    publishing = Publisher(KubeClient(url, token), ServiceRef(name="s", uid="1"), "pod-0")
    publishing.start()
    try:
        publishing.queue_incident(
            1, Incident(name="pod-0-1", kind=IncidentKind.STALL, epoch="a:1", opened_at=1.0)
        )
        deadline = time.monotonic() + 30
        while publishing._thread._failures < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        token.write_text("good")
        while (arrived := publishing.take_acknowledged()) == []:
            assert time.monotonic() < deadline, "the thread has ended"
            time.sleep(0.01)
        assert arrived == [("pod-0-1", 1)]
    finally:
        publishing.stop(5.0)


def written(revision: int, phase: str = "AwaitingSlot", at: float = 1000.0) -> PublishedObject:
    return PublishedObject("pod-0-1", "u", 1, revision, phase, at)


def waiting(phase: IncidentPhase = IncidentPhase.AWAITING_SLOT) -> Incident:
    kind = IncidentKind.HOST_GROWTH
    return Incident(name="a-1", kind=kind, epoch="a:1", opened_at=1.0, phase=phase)


def test_an_incident_that_waits_for_days_keeps_its_last_write_for_the_end() -> None:
    """The cluster lets a pod write each status only so often."""
    now, writes = 1000.0, 0
    while (wait := compute_publish_delay_s(waiting(), written(writes, at=now), now)) != NEVER_S:
        now, writes = now + wait, writes + 1
    assert writes == MAX_STATUS_WRITES - 1
    assert now - 1000 > 12 * 3600
    assert compute_publish_delay_s(waiting(IncidentPhase.RESOLVED), written(writes), 1000.0) == 0.0


def test_a_new_phase_does_not_wait_unless_there_were_very_many() -> None:
    draining = waiting(IncidentPhase.DRAINING)
    assert compute_publish_delay_s(draining, None, 1000.0) == 0.0
    assert compute_publish_delay_s(draining, written(50), 1000.0) == 0.0
    assert compute_publish_delay_s(draining, written(80), 1000.0) > 600


class Kube:
    """An API server that takes the status of an incident, and its Event after some answers."""

    def __init__(self, *events: int) -> None:
        self.events, self.revisions = list(events), list[int]()
        self.named: list[str] = []
        self.status: Object = {}

    def get(self, path: str) -> Object:
        return {"metadata": {"uid": "u"}, "spec": {"id": "a-1"}, "status": self.status}

    def apply(self, path: str, body: Object) -> Object:
        self.revisions.append(body["status"]["revision"])
        return body

    def create(self, path: str, body: Object) -> Object:
        if self.events:
            raise KubeError(self.events.pop(0), "no Event")
        self.named.append(body["metadata"]["name"])
        return body


def test_no_event_that_fails_writes_the_same_status_again() -> None:
    """The cluster takes each revision once, and only so many of them."""
    kube = Kube(503)
    publishing = Publisher(cast(KubeClient, kube), ServiceRef(name="s", uid="1"), "a")
    with pytest.raises(KubeError):
        publishing.publish(waiting())
    publishing.publish(waiting())
    assert kube.revisions == [1, 2]
    kube.events = [422]
    publishing.publish(waiting())
    assert kube.revisions == [1, 2, 3], "an Event that is refused is not worth another try"


def test_events_have_few_names_which_the_cluster_knows() -> None:
    """``config/admission-policy.yaml`` lists the phases, and bounds the number."""
    kube = Kube()
    publishing = Publisher(cast(KubeClient, kube), ServiceRef(name="s", uid="1"), "a" * 240)
    for phase in IncidentPhase:
        publishing.publish(waiting(phase))
    number = r"-1?[0-9]\."
    assert all(re.match("a" * 230 + number, name) and len(name) <= 253 for name in kube.named)
    policy = (Path(__file__).parents[3] / "config" / "admission-policy.yaml").read_text()
    (listed,) = re.findall(r"\[\.\]\(([a-z|]+)\)\$", policy)
    assert {name.rpartition(".")[2] for name in kube.named} == set(listed.split("|"))


def test_nothing_is_written_of_an_incident_whose_writes_are_used_up() -> None:
    kube = Kube()
    kube.status = {"revision": MAX_STATUS_WRITES, "phase": "Open"}
    publishing = Publisher(cast(KubeClient, kube), ServiceRef(name="s", uid="1"), "a")
    publishing.publish(waiting(IncidentPhase.RESOLVED))
    assert (kube.revisions, kube.named) == ([], [])
