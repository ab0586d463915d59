"""One incident is told alike from a supervisor's record and from a cluster's object."""

from __future__ import annotations

import msgspec
import pytest

from plimsoll_api.incident_object import make_spec, make_status
from plimsoll_api.incident_record import (
    Attribution,
    IncidentRecord,
    Reason,
    StepOutcome,
    StepRecord,
)
from plimsoll_api.incident_story import make_object_story, make_record_story
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.leakincident import LeakIncidentStatus
from plimsoll_api.supervisor_config import ServiceRef

MIB = 1 << 20
LEAK = IncidentRecord(
    name="qwen-0-1a2b3c4d",
    kind=IncidentKind.HOST_GROWTH,
    epoch="ab:1",
    opened_at=1_700_000_000.0,
    phase=IncidentPhase.RESOLVED,
    reason=Reason.WORKER_RESTART,
    attribution=Attribution(
        segment="python_objects", process="worker", bytes=200 * MIB, bytes_per_s=MIB / 60,
        bytes_per_request=90.4, confidence=0.97,
    ),
    timeline=[
        StepRecord(time=1_700_000_005.0, step="Trim", outcome=StepOutcome.BEGUN, before_bytes=1),
        StepRecord(
            time=1_700_000_030.0, step="WorkerRestart", outcome=StepOutcome.SUCCEEDED,
            before_bytes=910 * MIB, after_bytes=710 * MIB, message="8 requests\ncarried over",
        ),
    ],
    consumed_ratio=1.04,
    returned_bytes=200 * MIB,
    ended_at=1_700_000_090.0,
)  # fmt: skip


def test_both_forms_tell_the_same() -> None:
    spec = make_spec(LEAK, ServiceRef("qwen"), "qwen-0", "engine")
    assert make_object_story(LEAK.name, spec, make_status(LEAK)) == make_record_story(LEAK)


def test_the_story_in_a_line() -> None:
    assert make_record_story(LEAK).sentence == (
        "HostGrowth in python_objects of the worker, 200 MiB, 60.0 MiB an hour, 90 B a request,"
        " 104 % of the budget, 200 MiB were freed (WorkerRestart)."
    )


def test_what_shrinks_did_not_grow() -> None:
    """A pod writes these figures, and may write any."""
    seen = msgspec.structs.replace(
        LEAK.attribution, bytes=-MIB, bytes_per_s=-MIB, bytes_per_request=-9
    )
    story = make_record_story(msgspec.structs.replace(LEAK, attribution=seen))
    assert story.headline == "HostGrowth in python_objects of the worker"


def test_each_step_with_what_it_changed() -> None:
    trim, restart = make_record_story(LEAK).steps
    assert trim.text == "1 B -> ?"
    assert restart.text == "910 MiB -> 710 MiB (200 MiB back)  8 requests carried over"
    assert make_record_story(LEAK).memory == [
        (30.0, 910 * MIB),
        (30.0, 710 * MIB),
        (90.0, 710 * MIB),
    ]


@pytest.mark.parametrize("kind", IncidentKind)
def test_what_is_not_known_is_not_told(kind: IncidentKind) -> None:
    story = make_record_story(IncidentRecord(name="a", kind=kind, epoch="ab:1", opened_at=0.0))
    assert story.headline == kind.value
    assert (story.returned_bytes, story.ended_at, story.memory) == (None, None, [])
    assert ("budget" in story.sentence) is (story.spent_percent is not None)


def test_an_object_without_a_status_is_open() -> None:
    spec = make_spec(LEAK, ServiceRef("qwen"), "qwen-0", "engine")
    story = make_object_story(LEAK.name, spec, LeakIncidentStatus())
    assert (story.phase, story.has_ended, story.headline) == ("Open", False, "HostGrowth")


def test_a_time_that_is_none_ends_nothing() -> None:
    spec = make_spec(LEAK, ServiceRef("qwen"), "qwen-0", "engine")
    status = msgspec.structs.replace(make_status(LEAK), ended_at="soon")
    status.timeline[0].time = "yesterday"
    story = make_object_story(LEAK.name, spec, status)
    assert (story.ended_at, story.steps[0].at) == (None, story.opened_at)
