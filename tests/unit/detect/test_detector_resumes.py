"""A supervisor that starts anew goes on measuring from where its predecessor did.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

from leaklab.series import GIB, HOUR, MIB, Series, steady
from plimsoll_api.assessment import Assessment
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_sidecar.detect.detector import Detector

POLICY = MemoryPolicy(host=MemoryBudget(growth_bytes=512 * MIB, window_s=3600.0), warmup_s=30.0)
KILLED = 250.0
FAST = 400e6 / 60


def over_a_restart(series: Series) -> tuple[Assessment, list[Assessment]]:
    """The first detector's last view, and all views of the second one."""
    first, second = Detector(POLICY, 60.0, 1.0), Detector(POLICY, 60.0, 1.0)
    before: Assessment | None = None
    after: list[Assessment] = []
    for sample in series.samples():
        if sample.t < KILLED:
            before = first.update(sample)
            continue
        after.append(second.update(sample))
        if len(after) == 1:
            second.resume(first.make_checkpoint())
    assert before is not None
    return before, after


def test_a_leak_is_suspected_again_and_never_said_to_be_gone() -> None:
    before, after = over_a_restart(Series(duration=330, leak=steady(FAST, 120)))
    assert [s.kind for s in before.suspicions] == [IncidentKind.HOST_GROWTH]
    for assessment in after:
        assert assessment.suspicions or not assessment.warm, "silence would close the incident"
    last = after[-1]
    (suspicion,) = last.suspicions
    assert suspicion.process == before.suspicions[0].process
    assert last.host is not None
    assert last.host.unexplained is not None
    assert last.host.unexplained > 0.9 * FAST * (after[-1].t - 120)


def test_without_growth_it_is_warm_again_after_a_minute() -> None:
    _, after = over_a_restart(Series(duration=400))
    assert not any(assessment.suspicions for assessment in after)
    assert not after[30].warm
    assert after[70].warm


def test_nothing_is_remembered_before_the_warm_up_has_ended() -> None:
    detector = Detector(POLICY, 60.0, 1.0)
    for sample in Series(duration=10).samples():
        detector.update(sample)
    assert detector.make_checkpoint().host == []


def test_slow_growth_is_looked_for_from_the_first_requests_on() -> None:
    """They begin the warm-up again: what came before is no step of a slow leak."""
    policy = MemoryPolicy(host=MemoryBudget(growth_bytes=512 * MIB), warmup_s=60.0)
    detector = Detector(policy, 60.0, 60.0)
    series = Series(
        duration=22 * HOUR,
        interval=60.0,
        load=lambda t: 8 if t >= 11 * HOUR else 0,
    )
    known: dict[int, bool] = {}
    for sample in series.samples():
        known[int(sample.t)] = "host" in detector.update(sample).slow
    assert known[int(10.5 * HOUR)]
    assert not known[int(11.5 * HOUR)], "not known of an engine that serves"
    assert not known[19 * 3600]
    assert known[int(21.5 * HOUR)]


def test_a_slow_leak_stands_from_the_first_sample_on_and_ends_with_the_engine() -> None:
    policy = MemoryPolicy(
        host=MemoryBudget(growth_bytes=512 * MIB, limit_bytes=6 * GIB), warmup_s=60.0
    )
    first, second = Detector(policy, 60.0, 60.0), Detector(policy, 60.0, 60.0)
    series = Series(
        duration=34 * HOUR,
        interval=60.0,
        leak=steady(6 * MIB / HOUR),
        epoch=lambda t: 1 if t < 32 * HOUR else 2,
    )
    seen: list[bool | None] = []
    for sample in series.samples():
        if sample.t < 30 * HOUR:
            assessment = first.update(sample)
            continue
        sample.t -= 30 * HOUR  # its clock begins anew
        assessment = second.update(sample)
        if len(seen) == 0:
            second.resume(first.make_checkpoint())
            assessment = second.update(sample)
        slow = assessment.slow.get("host")
        seen.append(None if slow is None else slow.slow_leak)
        assert not assessment.suspicions, "it leads to no action"
    assert seen[:120] == [True] * 120
    assert seen[120:] == [None] * 120, "a new engine is not known yet"
