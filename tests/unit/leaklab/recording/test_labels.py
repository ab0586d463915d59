"""Labels of a recording: from the injector's count, or from the engine's own counter."""

from __future__ import annotations

import json

import pytest

from leaklab.recording.labels import labels
from leaklab.recording.run import Fault, Injection, Run
from leaklab.recording.runs import RUNS
from leaklab.recording.split import PARTS
from plimsoll_api.admin import Load
from plimsoll_api.assessment import Segment
from plimsoll_api.engines import EngineType
from plimsoll_api.trace import EngineInfo, Header, Sample

HEADER = Header(
    trace=1, name="run", engine=EngineInfo("vllm"), started_at="2026-01-01T00:00:10+00:00",
    interval_s=1.0,
)  # fmt: skip
BEGAN = 1767225600.0
"""The time of day at t = 0, of a first sample at t = 10."""


def samples(per_s: int = 0) -> list[Sample]:
    return [
        Sample(t=float(t), epoch=1, load=Load(requests_total=7 + per_s * (t - 10)))
        for t in range(10, 111)
    ]


def counted(*points: tuple[float, int]) -> list[str]:
    return [json.dumps({"at": BEGAN + t, "bytes": size, "units": 0}) for t, size in points]


def vllm(segment: Segment | None) -> Run:
    return Run(EngineType.VLLM, 1, "heap_blocks", cause=Injection(segment))


def test_a_leak_is_from_its_last_zero_to_the_last_count_within_the_recording() -> None:
    lines = counted((40, 0), (50, 0), (51, 100), (100, 1000), (120, 9000))
    found = labels(vllm(Segment.MALLOC_IN_USE), HEADER, samples(), lines)
    (leak,) = found.leaks
    assert not found.negative
    assert (leak.start_t, leak.end_t) == (50.0, 100.0)
    assert (leak.counted_bytes, leak.rate_bytes_per_s) == (1000, 20.0)
    assert (leak.kind, leak.segment) == ("HostGrowth", "malloc_in_use")


def test_memory_of_torch_is_the_devices() -> None:
    found = labels(
        vllm(Segment.TORCH_ALLOCATED), HEADER, samples(), counted((50, 0), (60, 9))
    )  # fmt: skip
    assert found.leaks[0].kind == "DeviceGrowth"


def test_a_fault_of_our_engine_is_counted_by_its_cause() -> None:
    fault = Fault("device_dict:bytes_per_request=1Ki", Segment.TORCH_ALLOCATED, 1024)
    run = Run(EngineType.PLIMSOLL, 1, "device_dict", cause=fault)
    (leak,) = labels(run, HEADER, samples(per_s=3), []).leaks
    assert leak.counted_bytes == 300 * 1024
    assert leak.rate_bytes_per_s == pytest.approx(3 * 1024, rel=0.01)


def test_a_leak_that_was_not_leaked_is_no_recording() -> None:
    with pytest.raises(ValueError, match="nothing was leaked"):
        labels(vllm(Segment.MALLOC_IN_USE), HEADER, samples(), counted((50, 0)))


def test_what_only_looks_like_a_leak_is_negative() -> None:
    found = labels(vllm(None), HEADER, samples(), [])
    assert (found.leaks, found.negative) == ([], True)
    cause = Injection(None, bound=96 << 20)
    found = labels(Run(EngineType.VLLM, 1, "staircase", cause=cause), HEADER, samples(), [])
    assert found.note == "staircase in the core: it is healthy, and holds at most 100663296 bytes"


def test_a_note_says_in_which_process_it_is_and_beside_what() -> None:
    lines = counted((40, 0), (60, 9))
    cause = Injection(Segment.SHARED, "requests", 9, shape="late", worker=True, beside="first_fill")
    run = Run(EngineType.VLLM, 1, "sealed_messages", cause=cause)
    said = "sealed_messages in the worker: 9 bytes per request, late, beside first_fill"
    assert labels(run, HEADER, samples(), lines).note == said


def test_every_run_has_a_part_and_a_name_of_its_own_that_tells_nothing() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)
    for run in RUNS:
        assert run.mechanism in PARTS
        assert run.mechanism not in run.name
