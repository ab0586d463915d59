"""The metrics: unknown is absent, growth survives epochs, remediations are counted once.

Tests ``record/metrics.py``.
"""

import time
from pathlib import Path

import pytest
from prometheus_client import Gauge

from plimsoll_api.assessment import Assessment, BudgetState, Segment, SlowGrowth
from plimsoll_api.incident_record import Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.learned import LearnedMemory
from plimsoll_api.memory_contract import MemoryNeeds
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.roles import PodRole
from plimsoll_api.state import Signal, SignalReason
from plimsoll_api.supervisor_config import GroupMember, ServiceRef
from plimsoll_api.trace import Host, OpenFiles, Sample
from plimsoll_sidecar.govern.command import Event, EventType
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record import collectors
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.cgroup import CgroupMemory
from plimsoll_sidecar.signals.resident_memory import ResidentMemory
from plimsoll_sidecar.signals.sampler import find_signals

ALL = {"engine": True, "host": True}
MIB = 1 << 20


def assessment(unexplained: int | None, epoch: int = 1) -> Assessment:
    return Assessment(
        t=1.0,
        epoch=epoch,
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
    metrics.observe(assessment(10), ALL, 0.001)
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="host") == 10
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="device") is None
    assert value(metrics, "plimsoll_memory_budget_exhaustion_seconds", kind="host") is None
    labels = {"segment": "orphan", "kind": "device"}
    assert value(metrics, "plimsoll_memory_segment_bytes", **labels) == 7
    metrics.observe(assessment(None), ALL, 0.001)
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="host") is None
    metrics.observe(assessment(10), ALL, 0.001)
    assert value(metrics, "plimsoll_memory_unexplained_bytes", kind="host") == 10


def test_a_value_that_is_absent_is_not_removed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    metrics.observe(assessment(10), ALL, 0.001)
    removed: list[Gauge] = []
    remove = Gauge.remove

    def removing(self: Gauge, *labels: str) -> None:
        removed.append(self)
        remove(self, *labels)

    monkeypatch.setattr(Gauge, "remove", removing)
    metrics.observe(assessment(10), ALL, 0.001)
    assert removed == []
    metrics.observe(assessment(None), ALL, 0.001)
    assert removed == [metrics._gauges[f"memory_{n}_bytes"] for n in ("unexplained", "baseline")]


def growth_of(series: list[tuple[int, int]]) -> float | None:
    metrics = Metrics()
    for epoch, unexplained in series:
        metrics.observe(assessment(unexplained * MIB, epoch), ALL, 0.001)
    total = value(metrics, "plimsoll_memory_unexplained_growth_bytes_total", kind="host")
    return None if total is None else total / MIB


def test_growth_is_a_counter_over_epochs() -> None:
    assert growth_of([(1, 0), (1, 30), (1, 40), (2, 0), (2, 5)]) == 40 + 5
    # Found by a new supervisor in an old epoch: what grew before it is not counted twice.
    assert growth_of([(1, 500), (1, 510), (2, 3)]) == 10 + 3


def test_noise_within_the_band_is_not_growth() -> None:
    assert growth_of([(1, 10 + n % 2) for n in range(1000)]) == 1


def test_growth_after_a_trim_counts_again_but_for_the_band() -> None:
    assert growth_of([(1, 0), (1, 100), (1, 20), (1, 60)]) == 100 + 40 - 2


def test_budgets_and_signals_are_shown() -> None:
    metrics = Metrics()
    metrics.export_budgets(MemoryPolicy(host=MemoryBudget(growth_bytes=64 * MIB, window_s=3600.0)))
    assert value(metrics, "plimsoll_memory_budget_bytes", kind="host") == 64 * MIB
    assert value(metrics, "plimsoll_memory_budget_window_seconds", kind="host") == 3600
    assert value(metrics, "plimsoll_memory_budget_bytes", kind="device") is None
    metrics.observe(assessment(0), {"engine": True, "host": False, "device": True}, 0.001)
    metrics.observe(assessment(0), {"engine": True, "host": False}, 0.001)
    unknown = "plimsoll_signal_unknown_samples_total"
    assert value(metrics, unknown, signal="engine") == 0
    assert value(metrics, unknown, signal="host") == 2
    assert value(metrics, unknown, signal="device") == 1, "a device that went away is unknown"
    assert value(metrics, "plimsoll_signal_age_seconds", signal="engine") == 0
    metrics.export_budgets(MemoryPolicy())
    assert value(metrics, "plimsoll_memory_budget_bytes", kind="host") is None


def test_the_wait_for_a_slot_is_measured_once() -> None:
    metrics = Metrics()
    incident = Incident(name="p-2", kind=IncidentKind.STALL, epoch="a:1", opened_at=1.0)
    incident.set_phase(IncidentPhase.AWAITING_SLOT, 10.0)
    for at in (10.0, 11.0):
        metrics.count_events([Event(type=EventType.ADVANCED, at=at, incident=incident)])
    incident.set_phase(IncidentPhase.RESTARTING, 22.5)
    for at in (22.5, 23.0):
        metrics.count_events([Event(type=EventType.ADVANCED, at=at, incident=incident)])
    assert value(metrics, "plimsoll_restart_slot_wait_seconds_count") == 1
    assert value(metrics, "plimsoll_restart_slot_wait_seconds_sum") == 12.5


def test_an_incident_and_its_remediations_are_counted_once() -> None:
    metrics = Metrics()
    incident = Incident(name="p-1", kind=IncidentKind.HOST_GROWTH, epoch="a:1", opened_at=1.0)
    metrics.count_events([Event(type=EventType.OPENED, at=1.0, incident=incident)])
    incident.add_step(
        StepRecord(time=2.0, step="Trim", outcome=StepOutcome.BEGUN, operation_id="o-1")
    )
    advanced = Event(type=EventType.ADVANCED, at=2.0, incident=incident)
    metrics.count_events([advanced])
    incident.timeline[0].outcome = StepOutcome.SUCCEEDED
    incident.timeline[0].finished_at = 2.5
    metrics.count_events([advanced, advanced])
    incident.phase, incident.reason, incident.returned_bytes = (
        IncidentPhase.RESOLVED,
        Reason.TRIM,
        50,
    )
    metrics.count_events([Event(type=EventType.ENDED, at=3.0, incident=incident)])
    assert value(metrics, "plimsoll_incidents_total", kind="HostGrowth") == 1
    labels = {"action": "Trim", "outcome": "Succeeded"}
    assert value(metrics, "plimsoll_remediations_total", **labels) == 1
    assert value(metrics, "plimsoll_remediation_duration_seconds_sum", action="Trim") == 0.5
    returned = {"action": "Trim", "kind": "host"}
    assert value(metrics, "plimsoll_remediation_returned_bytes_total", **returned) == 50
    ended = {"kind": "HostGrowth", "phase": "Resolved", "outcome": "Trim"}
    assert value(metrics, "plimsoll_incidents_ended_total", **ended) == 1
    assert b"plimsoll_supervisor_resident_memory_bytes" in metrics.render()


def test_a_new_supervisor_counts_no_step_again() -> None:
    """Prometheus adds the counts of both processes."""
    incident = Incident(name="p-1", kind=IncidentKind.STALL, epoch="a:1", opened_at=1.0)
    for number, outcome in enumerate((StepOutcome.FAILED, StepOutcome.BEGUN)):
        step = StepRecord(time=2.0, step="EngineRestart", outcome=outcome, operation_id=str(number))
        incident.add_step(step)
    incident.set_phase(IncidentPhase.AWAITING_SLOT, 10.0)
    metrics = Metrics()
    metrics.skip_counted_steps([incident])
    incident.timeline[1].outcome = StepOutcome.SUCCEEDED
    incident.set_phase(IncidentPhase.RESTARTING, 15.0)
    metrics.count_events([Event(type=EventType.ADVANCED, at=15.0, incident=incident)])
    for result, count in (("Failed", 0), ("Succeeded", 1)):
        labels = {"action": "EngineRestart", "outcome": result}
        assert value(metrics, "plimsoll_remediations_total", **labels) == count
    assert value(metrics, "plimsoll_restart_slot_wait_seconds_sum") == 5.0


def test_the_group_is_shown_as_far_as_it_is_known() -> None:
    groups = iter([CgroupMemory(), CgroupMemory(anon=5, throttled=2, stalled_some_s=1.5)])
    group = next(groups)
    metrics = Metrics(lambda: group)
    name = "plimsoll_cgroup_memory"
    assert value(metrics, f"{name}_bytes", kind="anon") is None
    group = next(groups)
    assert value(metrics, f"{name}_bytes", kind="anon") == 5
    assert value(metrics, f"{name}_bytes", kind="slab") is None
    assert value(metrics, f"{name}_events_total", event="high") == 2
    assert value(metrics, f"{name}_events_total", event="oom_kill") is None
    assert value(metrics, f"{name}_stalled_seconds_total", share="some") == 1.5
    assert b"plimsoll_cgroup_memory_events_created" not in metrics.render()


def test_swept_shared_memory_is_counted_from_zero() -> None:
    metrics = Metrics()
    assert "plimsoll_shared_memory_swept_bytes_total 0.0" in metrics.render().decode()
    metrics.count_swept_bytes(4096)
    metrics.count_swept_bytes(0)
    assert "plimsoll_shared_memory_swept_bytes_total 4096.0" in metrics.render().decode()


def test_shared_memory_that_cannot_be_scanned_is_an_unknown_signal() -> None:
    metrics = Metrics()
    for orphan in (None, 0):
        known = find_signals(Sample(t=1.0, epoch=1, host=Host(shm_orphan=orphan)), True)
        metrics.observe(assessment(1), {name: one.ok for name, one in known.items()}, 0.1)
    assert value(metrics, "plimsoll_signal_unknown_samples_total", signal="shared_memory") == 1
    unwatched = find_signals(Sample(t=1.0, epoch=1))
    assert "shared_memory" not in unwatched, "no volume of the pod is at /dev/shm"


def test_a_slow_leak_is_shown_while_it_is_there() -> None:
    metrics = Metrics()
    seen = assessment(10)

    def shown() -> tuple[float | None, float | None, float | None]:
        metrics.observe(seen, ALL, 0.001)
        name = "plimsoll_memory_slow_leak"
        return (
            value(metrics, name, kind="host"),
            value(metrics, f"{name}_bytes_per_second", kind="host", segment="shared"),
            value(metrics, f"{name}_limit_seconds", kind="host"),
        )

    assert shown() == (None, None, None), "not known yet is no zero"
    seen.slow = {"host": SlowGrowth()}
    assert shown() == (0, None, None)
    seen.slow = {
        "host": SlowGrowth(
            slow_leak=True, segment=Segment.SHARED, bytes_per_s=700.0, limit_s=90_000.0
        )
    }
    assert shown() == (1, 700, 90_000)
    seen.slow["host"].limit_s = None
    assert shown() == (1, 700, None)
    seen.slow = {}
    assert shown() == (None, None, None)


def cured_by_trim() -> list[Event]:
    """One turn that judges a trim and ends its incident, which each of its events has."""
    step = StepRecord(
        time=1.0, step="Trim", outcome=StepOutcome.SUCCEEDED, operation_id="1", finished_at=2.5
    )
    incident = Incident(
        name="pod-0-1",
        kind=IncidentKind.HOST_GROWTH,
        epoch="a:1",
        opened_at=1.0,
        phase=IncidentPhase.RESOLVED,
        reason=Reason.TRIM,
        returned_bytes=MIB,
        timeline=[step],
    )
    kinds = (EventType.ADVANCED, EventType.ENDED)
    return [Event(type=kind, at=9.0, incident=incident) for kind in kinds]


def test_a_remediation_that_ends_its_incident_counts_once() -> None:
    metrics = Metrics()
    metrics.count_events(cured_by_trim())
    labels = {"action": "Trim", "outcome": "Succeeded"}
    assert value(metrics, "plimsoll_remediations_total", **labels) == 1
    assert value(metrics, "plimsoll_remediation_duration_seconds_count", action="Trim") == 1
    assert metrics._counted == set(), "and is forgotten with its incident"


def test_a_scrape_at_any_moment_sees_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    metrics.observe(assessment(10), ALL, 0.001)
    seen: list[bool] = []
    labels = type(metrics._gauges["memory_segment_bytes"]).labels

    def scraped(self: Gauge, *values: str) -> Gauge:
        seen.append(b'segment="orphan"' in metrics.render())
        return labels(self, *values)

    monkeypatch.setattr(Gauge, "labels", scraped)
    grown = assessment(20)
    grown.segments[Segment.MALLOC_IN_USE] = 6
    metrics.observe(grown, ALL, 0.001)
    assert len(seen) > 2, "the growth and the segments"
    assert all(seen)


def test_the_whole_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that one supervisor shows after a sample and an incident."""
    monkeypatch.setattr(collectors, "read_resident_memory", lambda pid: ResidentMemory(6, 2, 0))
    monkeypatch.setattr(time, "process_time", lambda: 1.5)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(
        collectors, "read_thread_status", lambda: {"publisher": False, "slot": True}
    )
    metrics = Metrics(lambda: CgroupMemory(current=1 << 30, reclaimable=0, limit=2 << 30, ooms=1))
    metrics.export_budgets(MemoryPolicy(host=MemoryBudget(growth_bytes=64 * MIB, window_s=3600.0)))
    group = GroupMember("0", worker=False, subdomain="llm")
    metrics.export_role(ServiceRef("llm", group=group, role=PodRole.PREFILL))
    metrics.observe(assessment(10), ALL, 0.001)
    metrics.export_open_files(OpenFiles(process="worker", open=7, limit=1024))
    metrics.count_events(cured_by_trim())
    metrics.export_status(num_open_incidents=1, restarts_left=2, num_unpublished=3)
    metrics.export_unready_reasons(["manual"])
    metrics.export_missing_signals({"metrics": Signal(False, SignalReason.METRICS_SILENT, "why")})
    metrics.export_learned_budgets(
        {"host": LearnedMemory(86400, (1, 2, 3), 4, 64 * MIB)}, {"host": MemoryNeeds(5, 6, 7, 8)}
    )
    golden = Path(__file__).with_name("metrics.txt")
    assert metrics.render().decode() == golden.read_text(), f"if it is meant, write it to {golden}"
