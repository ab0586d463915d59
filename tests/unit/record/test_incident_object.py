"""The supervisor's shape of a LeakIncident against the resource definition's."""

import msgspec
import pytest
from pydantic import BaseModel

from plimsoll_api import leakincident
from plimsoll_api.supervision import ServiceRef
from plimsoll_sidecar.detect.assessment import Kind, Segment, Suspicion
from plimsoll_sidecar.govern.incident import (
    Incident,
    Phase,
    Reason,
    Step,
    StepOutcome,
    incident_name,
)
from plimsoll_sidecar.record import incident as shape
from plimsoll_sidecar.record.publisher import describe

SERVICE = ServiceRef(name="qwen", namespace="team-a", uid="1234")


def story() -> Incident:
    name = incident_name("qwen-5d9c-x", Kind.HOST_GROWTH, "ab:1", 1_700_000_000.0)
    incident = Incident(name=name, kind=Kind.HOST_GROWTH, epoch="ab:1", opened_at=1_700_000_000.0)
    incident.observe(
        Suspicion(
            kind=Kind.HOST_GROWTH,
            segment=Segment.PYTHON_OBJECTS,
            confidence=0.91234,
            consumed_ratio=1.204,
            bytes=512 << 20,
            bytes_per_s=1000.4,
            bytes_per_request=90.2,
            process="worker",
            evidence=["grows by 90 bytes a request"] * 50,
        )
    )
    incident.note(
        Step(
            time=1_700_000_010.5,
            step="Trim",
            outcome=StepOutcome.SUCCEEDED,
            before_bytes=600 << 20,
            after_bytes=590 << 20,
            message="gc 0.100 s",
        )
    )
    incident.phase, incident.reason = Phase.RESOLVED, Reason.WORKER_RESTART
    incident.returned_bytes, incident.confirmed_at = 500 << 20, 1_700_000_020.0
    incident.ended_at = 1_700_000_060.0
    return incident


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (shape.IncidentSpec, leakincident.LeakIncidentSpec),
        (shape.IncidentStatus, leakincident.LeakIncidentStatus),
        (shape.IncidentAttribution, leakincident.IncidentAttribution),
        (shape.IncidentStep, leakincident.TimelineStep),
    ],
)
def test_both_shapes_have_the_same_fields(
    ours: type[msgspec.Struct], theirs: type[BaseModel]
) -> None:
    assert set(ours.__struct_fields__) == set(theirs.model_fields)


def test_both_know_the_same_phases_and_kinds() -> None:
    assert {p.value for p in Phase} == {p.value for p in leakincident.IncidentPhase}
    told_by_operator = {leakincident.IncidentKind.CRASH_LOOP.value}
    known = {k.value for k in Kind} | told_by_operator
    assert known == {k.value for k in leakincident.IncidentKind}


def test_a_whole_story_is_a_valid_object() -> None:
    incident = story()
    body = shape.object_of(incident, SERVICE, "qwen-5d9c-x", "engine")
    status = shape.status_object_of(incident, SERVICE)["status"]
    parsed = leakincident.LeakIncident.model_validate(body | {"status": status})
    assert parsed.spec.opened_at == "2023-11-14T22:13:20Z"
    assert parsed.status is not None
    assert parsed.status.attribution is not None
    assert parsed.status.attribution.bytes_per_hour == 3_601_440
    assert parsed.status.consumed_percent == 120
    assert parsed.status.outcome == "WorkerRestart"
    assert body["metadata"]["ownerReferences"][0]["uid"] == "1234"
    assert "500.0 MiB" in describe(incident) or "500 MiB" in describe(incident)


def test_unknown_values_are_absent() -> None:
    incident = Incident(name="a-1", kind=Kind.STALL, epoch="ab:1", opened_at=0.0)
    status = msgspec.to_builtins(shape.status_of(incident))
    assert "returnedBytes" not in status
    assert "segment" not in status["attribution"]


def test_the_name_is_made_from_the_identity() -> None:
    one = incident_name("pod", Kind.STALL, "ab:1", 5.0)
    assert one == incident_name("pod", Kind.STALL, "ab:1", 5.0)
    assert one != incident_name("pod", Kind.STALL, "ab:2", 5.0)
    assert len(incident_name("p" * 253, Kind.STALL, "ab:1", 5.0)) <= 253
