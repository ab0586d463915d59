"""What a Stop had to wait for."""

from __future__ import annotations

from plimsoll_engine.worker.activity import MAX_RECORDED_SPANS, ActivityRecorder


def test_only_what_was_done_since_the_moment_counts() -> None:
    now = [0.0]
    activity = ActivityRecorder(lambda: now[0])

    def spend(name: str, seconds: float) -> None:
        now[0] += seconds
        activity.record(name)

    activity.begin()
    spend("step", 1.0)
    spend("capture", 2.0)
    now[0] += 5.0  # it waits for messages
    activity.begin()
    spend("messages", 0.5)
    spend("step", 1.5)
    assert activity.get_durations_since(0.0) == {"step": 2.5, "capture": 2.0, "messages": 0.5}
    assert activity.get_durations_since(2.0) == {"capture": 1.0, "messages": 0.5, "step": 1.5}
    assert activity.get_durations_since(9.0) == {"step": 1.0}
    assert activity.get_durations_since(10.0) == {}
    for _ in range(2 * MAX_RECORDED_SPANS):
        spend("report", 1.0)
    assert activity.get_durations_since(0.0) == {"report": float(MAX_RECORDED_SPANS)}
