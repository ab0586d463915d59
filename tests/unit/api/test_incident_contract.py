"""What the supervisor writes (msgspec) and what the CRD holds (pydantic) are one contract."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from plimsoll_api import leakincident
from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.govern.incident import Incident, Phase
from plimsoll_sidecar.record import incident as written


@pytest.mark.parametrize(
    ("struct", "model"),
    [
        (written.IncidentSpec, leakincident.LeakIncidentSpec),
        (written.IncidentAttribution, leakincident.IncidentAttribution),
        (written.IncidentStep, leakincident.TimelineStep),
        (written.IncidentStatus, leakincident.LeakIncidentStatus),
    ],
)
def test_same_fields(struct: Any, model: type[BaseModel]) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(struct)}
    assert names == {field.alias for field in model.model_fields.values()}


def test_same_phases_and_kinds() -> None:
    assert {phase.value for phase in Phase} == {one.value for one in leakincident.IncidentPhase}
    assert {kind.value for kind in Kind} <= {one.value for one in leakincident.IncidentKind}
    ends = {
        phase.value
        for phase in Phase
        if Incident(
            name="a-1", kind=Kind.HOST_GROWTH, epoch="b:1", opened_at=0.0, phase=phase
        ).ended
    }
    assert ends == {phase.value for phase in leakincident.ENDED}


def test_what_is_written_can_be_read() -> None:
    incident = Incident(name="a-1", kind=Kind.HOST_GROWTH, epoch="b:1", opened_at=1e9)
    status = msgspec.to_builtins(written.status_of(incident))
    spec = msgspec.to_builtins(written.spec_of(incident, "a", "a-pod", "engine"))
    leakincident.LeakIncidentStatus.model_validate(status)
    assert leakincident.LeakIncidentSpec.model_validate(spec).kind == "HostGrowth"
