"""An incident is the same in the journal, in ``/state`` and as an object of the cluster.

Tests ``plimsoll_api/incident_object.py`` and ``plimsoll_api/incidents.py``.
"""

from __future__ import annotations

import msgspec

from plimsoll_api import incident_object as written
from plimsoll_api import incidents, leakincident
from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.names import POLICY_KIND, POLICY_LABEL, SERVICE_LABEL
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import Action
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.workloads import WorkloadRef
from plimsoll_sidecar.govern.incident import Incident


def test_the_last_phases_are_ends() -> None:
    ends = {phase for phase in IncidentPhase if IncidentRecord(
        name="a-1", kind=IncidentKind.HOST_GROWTH, epoch="b:1", opened_at=0.0, phase=phase
    ).ended}  # fmt: skip
    assert ends == incidents.ENDED_PHASES


def test_what_is_written_can_be_read() -> None:
    incident = Incident(name="a-1", kind=IncidentKind.HOST_GROWTH, epoch="b:1", opened_at=1e9)
    status = written.make_status(incident)
    spec = written.make_spec(incident, ServiceRef("a"), "a-pod", "engine")

    assert msgspec.convert(msgspec.to_builtins(status), leakincident.LeakIncidentStatus) == status
    assert msgspec.convert(msgspec.to_builtins(spec), leakincident.LeakIncidentSpec) == spec


def test_an_incident_of_a_policy_names_its_workload() -> None:
    incident = Incident(name="a-1", kind=IncidentKind.HOST_GROWTH, epoch="b:1", opened_at=1e9)
    service = ServiceRef("engines", "ml", "u", POLICY_KIND, WorkloadRef("Deployment", "vllm"))
    made = written.make_object(incident, "vllm-0-1", service, "vllm-0", "server")
    assert made["spec"]["policyRef"] == {"name": "engines"}
    ref = {"apiGroup": "apps", "kind": "Deployment", "name": "vllm"}
    assert made["spec"]["workloadRef"] == ref
    assert made["metadata"]["labels"] == {SERVICE_LABEL: "vllm", POLICY_LABEL: "engines"}
    assert "ownerReferences" not in made["metadata"], "it outlives its policy"


def test_an_incident_names_the_role_of_its_pod() -> None:
    incident = Incident(name="a-1", kind=IncidentKind.STALL, epoch="b:1", opened_at=1e9)
    service = ServiceRef("engines", "ml", "u", POLICY_KIND, role=PodRole.PREFILL)
    made = written.make_object(incident, "vllm-0-1", service, "vllm-0", "server")
    assert made["spec"]["target"] == {"role": "Prefill"}
    without = written.make_object(incident, "vllm-0-1", ServiceRef("a"), "vllm-0", "server")
    assert "target" not in without["spec"]


def test_an_incident_of_a_service_names_it_with_its_group() -> None:
    incident = Incident(name="a-1", kind=IncidentKind.HOST_GROWTH, epoch="b:1", opened_at=1e9)
    made = written.make_object(
        incident, "qwen-0-1", ServiceRef("qwen", "ml", "u"), "qwen-0", "engine"
    )
    ref = {"apiGroup": "plimsoll.dev", "kind": "InferenceService", "name": "qwen"}
    assert made["spec"]["workloadRef"] == ref
    assert "policyRef" not in made["spec"]
    assert made["metadata"]["labels"] == {SERVICE_LABEL: "qwen"}


def test_a_record_is_read_from_what_the_governor_keeps() -> None:
    """The governor's own bookkeeping is left out, and nothing else."""
    kept = Incident(
        name="a-1", kind=IncidentKind.STALL, epoch="b:1", opened_at=1.0, seen_s=7.0,
        rung=Action.TRIM, message="said",
    )  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(kept), type=IncidentRecord) == IncidentRecord(
        name="a-1", kind=IncidentKind.STALL, epoch="b:1", opened_at=1.0,
        rung=Action.TRIM, message="said",
    )  # fmt: skip
