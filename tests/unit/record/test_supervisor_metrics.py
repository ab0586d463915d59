"""The metrics: unknown is absent, growth survives epochs, remediations are counted once."""

from plimsoll_sidecar.detect.assessment import Assessment, BudgetState, Kind, Segment
from plimsoll_sidecar.govern.command import Event, Happening
from plimsoll_sidecar.govern.incident import Incident, Phase, Step, StepOutcome
from plimsoll_sidecar.record.metrics import Metrics


def assessment(unexplained: int | None) -> Assessment:
    return Assessment(
        t=1.0,
        epoch=1,
        warm=True,
        segments={Segment.MALLOC_IN_USE: 5, Segment.ORPHAN: 7},
        host=BudgetState(unexplained=unexplained, baseline=100)
        if unexplained is not None
        else None,
    )


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_unknown_is_absent() -> None:
    metrics = Metrics()
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="host") is None
    metrics.observe(assessment(10), True, 0.001)
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="host") == 10
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="device") is None
    assert value(metrics, "plimsoll_memory_budget_exhaustion_seconds", kind="host") is None
    labels = {"segment": "orphan", "kind": "device"}
    assert value(metrics, "plimsoll_memory_segment_bytes", **labels) == 7
    metrics.observe(assessment(None), True, 0.001)
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="host") is None


def test_growth_is_a_counter_over_epochs() -> None:
    metrics = Metrics()
    for unexplained in (0, 30, 20, 40, 0, 5):
        metrics.observe(assessment(unexplained), True, 0.001)
    total = value(metrics, "plimsoll_memory_unexplained_growth_bytes_total", kind="host")
    assert total == 30 + 20 + 5


def test_an_incident_and_its_remediations_are_counted_once() -> None:
    metrics = Metrics()
    incident = Incident(name="p-1", kind=Kind.HOST_GROWTH, epoch="a:1", opened_at=1.0)
    metrics.happened([Event(happening=Happening.OPENED, at=1.0, incident=incident)])
    incident.note(Step(time=2.0, step="Trim", outcome=StepOutcome.BEGUN, operation_id="o-1"))
    advanced = Event(happening=Happening.ADVANCED, at=2.0, incident=incident)
    metrics.happened([advanced])
    incident.timeline[0].outcome = StepOutcome.SUCCEEDED
    metrics.happened([advanced, advanced])
    incident.phase, incident.returned_bytes = Phase.RESOLVED, 50
    metrics.happened([Event(happening=Happening.ENDED, at=3.0, incident=incident)])
    assert value(metrics, "plimsoll_incidents_total", kind="HostGrowth") == 1
    labels = {"action": "Trim", "outcome": "Succeeded"}
    assert value(metrics, "plimsoll_remediations_total", **labels) == 1
    assert value(metrics, "plimsoll_remediation_returned_bytes_total") == 50
    assert b"plimsoll_supervisor_resident_memory_bytes" in metrics.text()
