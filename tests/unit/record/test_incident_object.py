"""The object that the supervisor writes for an incident.

Tests ``plimsoll_api/incident_object.py``.
"""

import msgspec

from plimsoll_api import incident_object as shape
from plimsoll_api import leakincident
from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incident_record import Reason, StepOutcome, StepRecord
from plimsoll_api.incident_story import make_record_story
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_sidecar.govern.incident import Incident, make_incident_name

SERVICE = ServiceRef(name="qwen", namespace="team-a", uid="1234")


def story() -> Incident:
    name = make_incident_name("qwen-5d9c-x", IncidentKind.HOST_GROWTH, "ab:1", 1_700_000_000.0)
    incident = Incident(
        name=name, kind=IncidentKind.HOST_GROWTH, epoch="ab:1", opened_at=1_700_000_000.0
    )
    incident.observe(
        Suspicion(
            kind=IncidentKind.HOST_GROWTH,
            segment=Segment.PYTHON_OBJECTS,
            confidence=0.91234,
            consumed_ratio=1.204,
            bytes=512 << 20,
            bytes_per_s=1000.4,
            bytes_per_request=90.2,
            process="worker",
            evidence=["grows by 90 bytes a request"] * 50,
        ),
        covered_s=1.0,
    )
    incident.add_step(
        StepRecord(
            time=1_700_000_010.5,
            step="Trim",
            outcome=StepOutcome.SUCCEEDED,
            before_bytes=600 << 20,
            after_bytes=590 << 20,
            message="gc 0.100 s",
        )
    )
    incident.phase, incident.reason = IncidentPhase.RESOLVED, Reason.WORKER_RESTART
    incident.returned_bytes, incident.confirmed_at = 500 << 20, 1_700_000_020.0
    incident.ended_at = 1_700_000_060.0
    return incident


def test_a_whole_story_is_a_valid_object() -> None:
    incident = story()
    body = shape.make_object(incident, "qwen-5d9c-x-7", SERVICE, "qwen-5d9c-x", "engine")
    status = shape.make_status_object(incident, "qwen-5d9c-x-7", SERVICE, 3)["status"]
    parsed = msgspec.convert(body | {"status": status}, leakincident.LeakIncident)
    assert parsed.spec.opened_at == "2023-11-14T22:13:20Z"
    assert parsed.status is not None
    assert parsed.status.attribution is not None
    assert parsed.status.attribution.bytes_per_hour == 3_601_440
    assert parsed.status.consumed_percent == 120
    assert parsed.status.outcome == "WorkerRestart"
    assert "ownerReferences" not in body["metadata"], "it outlives its service"
    assert make_record_story(incident).sentence.startswith(
        "HostGrowth in python_objects of the worker, 512 MiB"
    )


def test_a_story_of_any_length_fits() -> None:
    """Whatever texts an engine brings, the object is no larger than the schema lets it be."""
    incident = story()
    incident.message = "m" * 9_000
    incident.attribution.evidence = ["e" * 9_000] * 40
    incident.diagnostics = ["/d" * 900] * 40
    incident.timeline = [
        StepRecord(time=float(n), step="Trim", outcome=StepOutcome.FAILED, message=f"{n}" * 900)
        for n in range(60)
    ]
    status = shape.make_status(incident, 1)
    steps = [one.message or "" for one in status.timeline]
    assert status.attribution is not None
    texts = [status.message or "", *status.attribution.evidence, *status.diagnostics, *steps]
    assert sum(map(len, texts)) <= leakincident.MAX_TOTAL_TEXT_CHARS
    assert all(len(one) <= leakincident.MAX_INCIDENT_TEXT_CHARS for one in texts)
    assert len(status.timeline) == leakincident.MAX_STATUS_STEPS
    assert status.timeline[-1].time == "1970-01-01T00:00:59Z", "the newest steps are kept"
    assert texts[0].endswith("m…"), "a text that was cut shows it"


def test_tools_that_know_no_phases_read_conditions() -> None:
    incident = story()
    for phase, going_on, well in (
        (IncidentPhase.OPEN, "True", "False"),
        (IncidentPhase.RESOLVED, "False", "True"),
        (IncidentPhase.UNRESOLVED, "False", "False"),
    ):
        incident.phase = phase
        status = shape.make_status(incident)
        found = {one.type: one.status for one in status.conditions}
        assert found == {"Reconciling": going_on, "Resolved": well}
        assert status.observed_generation == 1


def test_unknown_values_are_absent() -> None:
    incident = Incident(name="a-1", kind=IncidentKind.STALL, epoch="ab:1", opened_at=0.0)
    status = msgspec.to_builtins(shape.make_status(incident))
    assert "returnedBytes" not in status
    assert "segment" not in status["attribution"]


def test_the_name_is_made_from_the_identity() -> None:
    one = make_incident_name("pod", IncidentKind.STALL, "ab:1", 5.0)
    assert one == make_incident_name("pod", IncidentKind.STALL, "ab:1", 5.0)
    assert one != make_incident_name("pod", IncidentKind.STALL, "ab:2", 5.0)
    assert len(make_incident_name("p" * 253, IncidentKind.STALL, "ab:1", 5.0)) <= 253
