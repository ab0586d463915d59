"""From what the demo saw to its figures and its verdict.

Tests ``demo/evidence.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from plimsoll_api.incident_record import Attribution, Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.trace import Host, Sample
from plimsoll_cli import manifest
from plimsoll_cli.demo import command, story
from plimsoll_cli.demo.evidence import (
    DeviceBytes,
    LeakProbability,
    MemorySample,
    Observations,
    PhaseTimes,
    compute_host_memory,
    compute_idle_bytes,
    compute_results,
    find_failures,
    find_overlapping_gaps,
    find_pauses,
)
from plimsoll_cli.demo.streams import Reply, ReplyState, find_longest_gap
from plimsoll_cli.errors import UsageError
from plimsoll_sidecar.govern.incident import Incident

MIB = 1 << 20
START = 1_700_000_000.0
IDLE, PEAK = 900 * MIB, 1100 * MIB


def reply(stream: int, *chunks: float, state: ReplyState = ReplyState.COMPLETE) -> Reply:
    times = [START + at for at in chunks]
    return Reply(stream, 0, times[0] - 0.1, "text", times, state)


INCIDENT = Incident(
    name="leaky-1a2b3c4d",
    kind=IncidentKind.HOST_GROWTH,
    epoch="3f9c21d0:1",
    opened_at=START + 20,
    ended_at=START + 50,
    phase=IncidentPhase.RESOLVED,
    reason=Reason.WORKER_RESTART,
    attribution=Attribution(segment="malloc_in_use", bytes=150 * MIB, evidence=["150 MiB in 20 s"]),
    baseline_bytes=950 * MIB,
    before_bytes=PEAK,
    returned_bytes=190 * MIB,
    confirmed_at=START + 28,
    timeline=[
        StepRecord(time=START + 22, step="Trim", outcome=StepOutcome.SUCCEEDED),
        StepRecord(
            time=START + 30,
            step="WorkerRestart",
            outcome=StepOutcome.SUCCEEDED,
            finished_at=START + 32,
            message="2 requests carried over",
        ),
    ],
)
MEMORY = [
    *(MemorySample(START + at, IDLE) for at in (-3, -2, -1)),
    *(MemorySample(START + at, IDLE + at * 6 * MIB) for at in range(1, 30)),
    *(MemorySample(START + at, IDLE + 5 * MIB) for at in range(33, 70)),
]
SEEN = Observations(
    incidents=[INCIDENT],
    memory=MEMORY,
    replies=[reply(0, 29.0, 29.5, 31.0, 32.5), reply(1, 29.2, 29.9, 31.9), reply(0, 33.0, 33.1)],
    texts_different=0,
    streams=2,
    times=PhaseTimes(START - 3, START, START + 60, START + 68),
    probabilities=[LeakProbability(START + at, 0.9 if 20 < at < 33 else 0.0) for at in range(60)],
)


def test_the_time_from_the_crossing_of_the_budget_is_measured() -> None:
    """Memory grows by 6 MiB a second and stands 80 MiB above idle, the line, after 14 s."""
    values = compute_results(replace(SEEN, budget_bytes=30 * MIB))

    assert values["crossing_to_resolved_s"] == 36
    assert values["budget_spent_at_restart_ratio"] == (PEAK - 950 * MIB) / (30 * MIB)
    assert "crossing_to_resolved_s" not in compute_results(SEEN), (
        "without a budget there is no line"
    )


def test_a_cure_gives_figures_and_nothing_is_missing() -> None:
    values = compute_results(SEEN)

    assert values["incidents_resolved_count"] == 1
    assert values["worker_restarts_count"] == 1
    assert values["growth_bytes"] == PEAK - IDLE
    assert values["judged_growth_bytes"] == PEAK - 950 * MIB
    assert values["returned_bytes"] == 190 * MIB
    assert values["memory_baseline_bytes"] == IDLE
    assert values["memory_after_bytes"] == IDLE + 5 * MIB
    assert values["detect_to_resolved_s"] == 30
    assert values["streams_carried_count"] == 2
    assert values["pause_p50_s"] == pytest.approx(1.5)
    assert values["pause_p99_s"] == pytest.approx(2.0)
    assert find_failures(values) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"incidents": []}, "no worker restart resolved an incident"),
        (
            {"incidents": [msgspec.structs.replace(INCIDENT, reason=Reason.TRIM)]},
            "no worker restart resolved an incident",
        ),
        ({"replies": [reply(0, 1.0, state=ReplyState.BROKEN)]}, "1 streams broke"),
        ({"replies": [reply(0, 1.0, state=ReplyState.FAILED)]}, "1 requests failed"),
        ({"texts_different": 3}, "3 replies differ"),
        ({"memory": []}, "could not be measured"),
        (
            {"memory": [*MEMORY[:30], MemorySample(START + 65, IDLE + 30 * MIB)]},
            "above the baseline",
        ),
        ({"device": DeviceBytes(100, 101)}, "device memory is 101 bytes after the traffic"),
    ],
)
def test_what_is_missing_is_said(change: dict[str, object], expected: str) -> None:
    lacks = find_failures(compute_results(replace(SEEN, **change)))  # type: ignore[arg-type]

    assert any(expected in line for line in lacks), lacks


def test_memory_below_the_baseline_is_back() -> None:
    memory = [*MEMORY[:30], MemorySample(START + 65, IDLE - 30 * MIB)]
    assert find_failures(compute_results(replace(SEEN, memory=memory))) == []


def test_a_restart_that_failed_is_no_restart() -> None:
    failed = msgspec.structs.replace(INCIDENT.timeline[1], outcome=StepOutcome.FAILED)
    incident = msgspec.structs.replace(INCIDENT, timeline=[failed])

    assert compute_results(replace(SEEN, incidents=[incident]))["worker_restarts_count"] == 0


def test_only_replies_that_the_restart_met_have_a_pause() -> None:
    window = (START + 30, START + 32)
    before, after = reply(0, 20.0, 29.0), reply(0, 31.0, 40.0)
    across = reply(0, 29.0, 30.5, 31.0, 39.0)

    assert find_pauses([before, after], [window]) == []
    # The gap after the restart began inside of its window and counts.
    assert find_pauses([across], [window]) == [pytest.approx(8.0)]
    assert len(find_overlapping_gaps(across, window)) == 3


def test_memory_is_read_as_the_detector_reads_it() -> None:
    samples = [
        Sample(t=0.0, epoch=1, host=Host(rss_anon=10, rss_shmem=2)),
        Sample(t=1.0, epoch=1),
        Sample(t=2.0, epoch=1, host=Host(rss_anon=12, rss_shmem=2)),
    ]

    assert compute_host_memory(samples, START) == [
        MemorySample(START, 12),
        MemorySample(START + 2, 14),
    ]
    assert compute_host_memory([Sample(t=0.0, epoch=1)], START) == []


def test_idle_memory_is_a_median_and_unknown_without_samples() -> None:
    points = [MemorySample(START, 1), MemorySample(START + 1, 100), MemorySample(START + 2, 3)]

    assert compute_idle_bytes(points, START, START + 2) == 3
    assert compute_idle_bytes(points, START + 5, START + 6) is None


def test_a_reply_with_one_chunk_has_no_gap() -> None:
    assert find_longest_gap(reply(0, 1.0)) is None
    assert find_longest_gap(reply(0, 1.0, 1.5, 1.7)) == pytest.approx(0.5)


def test_the_story_tells_each_step_and_the_outcome() -> None:
    values = compute_results(SEEN)
    text = story.format_story("leaky", SEEN, values, ["2 streams broke"])
    assert "Memory grew by 200 MiB; the restart freed 190 MiB.\n" in text
    assert "Of this growth, 150 MiB count against the leak budget." in text

    assert "+22.0 s  Trim succeeded" in text
    assert "+30.0 s  WorkerRestart succeeded: 2 requests carried over" in text
    assert "+50.0 s  resolved by WorkerRestart: 190 MiB freed" in text
    assert "evidence: 150 MiB in 20 s" in text
    assert "MISSING: 2 streams broke" in text
    assert text.index("Trim") < text.index("leak confirmed") < text.index("resolved by")


def test_the_report_is_written_also_when_nothing_was_found(tmp_path: Path) -> None:
    nothing = replace(SEEN, incidents=[], memory=[], replies=[])
    values = compute_results(nothing)

    story.write_report(
        tmp_path, nothing, values, find_failures(values), "leaky", None, ["plimsoll", "demo"]
    )

    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"report.json", "incident.json", "memory.png", "story.txt"}
    assert (tmp_path / "incident.json").read_text() == "null\n"
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def leaky() -> InferenceService:
    return manifest.read_service(command.DEMO_MANIFEST)


def test_the_clean_service_differs_by_the_fault_alone() -> None:
    clean = command.remove_fault(leaky())

    assert clean.spec.engine.env == []
    assert clean.spec.engine.args == leaky().spec.engine.args
    assert clean.spec.memory == leaky().spec.memory


def test_the_device_is_the_last_word() -> None:
    assert command.set_device(leaky(), "cuda").spec.engine.args[-2:] == [
        "--device=cuda",
        "--dtype=float32",
    ]


def test_a_manifest_that_makes_no_demo_is_refused() -> None:
    file = Path("healthy.yaml")

    command.check_manifest(file, leaky())
    with pytest.raises(UsageError, match=r"healthy\.yaml: spec\.engine\.env: add PLIMSOLL_INJECT"):
        command.check_manifest(file, command.remove_fault(leaky()))
