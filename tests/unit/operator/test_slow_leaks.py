"""The condition ``SlowLeak``, from a supervisor's own page to its message.

Tests ``fleet/supervisor_metrics.py`` and ``status/conditions.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.assessment import Assessment, Segment, SlowGrowth
from plimsoll_api.inferenceservice_status import ConditionType
from plimsoll_operator.fleet.supervisor_metrics import (
    MAX_LEAK_BYTES_PER_S,
    MAX_SECONDS_TO_LIMIT,
    SlowLeak,
    SupervisorMetrics,
    parse_metrics_page,
)
from plimsoll_operator.scraper import _list_status_parts
from plimsoll_operator.status.conditions import (
    MAX_MESSAGE_CHARS,
    MAX_SLOW_LEAKS,
    ConditionState,
    make_slow_leak_condition,
)
from plimsoll_sidecar.record.metrics import Metrics

MIB_PER_HOUR = (1 << 20) / 3600
DAY = 86_400.0
LEAK = SlowGrowth(
    slow_leak=True,
    segment=Segment.MALLOC_IN_USE,
    bytes_per_s=12.34 * MIB_PER_HOUR,
    limit_s=5.2 * DAY,
)


def page(**slow: SlowGrowth) -> bytes:
    """What a supervisor answers to a scrape."""
    metrics = Metrics()
    metrics.observe(Assessment(t=1.0, epoch=1, warm=True, slow=slow), {}, 0.0)
    return metrics.render()


def verdict(**pages: bytes) -> ConditionState:
    return make_slow_leak_condition(
        ConditionType.SLOW_LEAK, {pod: parse_metrics_page(text) for pod, text in pages.items()}
    )


def test_a_slow_leak_names_replica_segment_rate_and_time() -> None:
    found = verdict(a=page(host=SlowGrowth()), b=page(host=LEAK, device=SlowGrowth()))
    assert found.status is True
    assert found.reason == "MemoryKeepsGrowing"
    assert found.message == (
        "b: host memory (malloc_in_use) grows by 12.0 MiB an hour and reaches its limit in about"
        " 5 days"
    )


def test_without_a_limit_the_message_says_so() -> None:
    leak = SlowGrowth(slow_leak=True, bytes_per_s=3 * MIB_PER_HOUR)
    assert verdict(a=page(device=leak)).message == (
        "a: device memory grows by 3.0 MiB an hour, and no memory limit is known"
    )


def test_the_least_time_comes_first_and_the_message_is_bounded() -> None:
    leaks = {
        f"pod-{number:03}": SupervisorMetrics(
            slow_leaks=(SlowLeak("host", "", 1e3, number * DAY or None),)
        )
        for number in range(20)
    }
    text = make_slow_leak_condition(ConditionType.SLOW_LEAK, leaks).message
    assert text.startswith("pod-001: ")
    assert text.endswith(f"; and {20 - MAX_SLOW_LEAKS} more leaks")
    long = {"p" * 253 + f"{number}": one for number, one in enumerate(leaks.values())}
    assert len(make_slow_leak_condition(ConditionType.SLOW_LEAK, long).message) <= MAX_MESSAGE_CHARS


def test_no_growth_is_false_and_too_short_a_history_is_unknown() -> None:
    known = verdict(a=page(host=SlowGrowth()), b=page())
    assert (known.status, known.reason) == (False, "NoSlowLeak")
    assert known.message == "memory growth has been evaluated in 1 of 2 pods"
    unknown = verdict(a=page(), b=page())
    assert (unknown.status, unknown.reason) == (None, "InsufficientData")
    assert verdict().status is None


def test_a_little_more_of_the_same_writes_no_status() -> None:
    def shown(rate: float, left_s: float) -> object:
        return _list_status_parts(
            {
                "a": SupervisorMetrics(
                    slow_leaks=(SlowLeak("host", "shared", rate * MIB_PER_HOUR, left_s),)
                )
            }
        )

    assert shown(12.1, 5.2 * DAY) == shown(12.2, 5.1 * DAY)
    assert shown(12.1, 5.2 * DAY) != shown(12.1, 4.2 * DAY)


@pytest.mark.parametrize(
    "line",
    [
        b'plimsoll_memory_slow_leak{kind="host"} 7',
        b'plimsoll_memory_slow_leak{kind="other"} 1',
        b'plimsoll_memory_slow_leak{kind="host"} NaN',
        b"plimsoll_memory_slow_leak 1",
    ],
)
def test_what_no_supervisor_writes_is_unknown(line: bytes) -> None:
    assert parse_metrics_page(line + b"\n").slow_leaks is None


def test_a_segment_that_does_not_exist_is_not_shown() -> None:
    text = page(host=LEAK).replace(b"malloc_in_use", b"x_injected_text")
    (found,) = parse_metrics_page(text).slow_leaks or ()
    assert found.segment == ""


NAMES = st.sampled_from(["", "_bytes_per_second", "_limit_seconds"])
LABELS = st.sampled_from(["", '{kind="host"}', '{segment="shared",kind="device"}', '{kind="x"}'])


@given(st.lists(st.tuples(NAMES, LABELS, st.floats().map(repr)), max_size=12))
def test_any_page_gives_a_bounded_verdict(lines: list[tuple[str, str, str]]) -> None:
    text = "\n".join(f"plimsoll_memory_slow_leak{n}{labels} {v}" for n, labels, v in lines)
    metrics = parse_metrics_page(text.encode())
    for one in metrics.slow_leaks or ():
        assert 0 <= one.bytes_per_s <= MAX_LEAK_BYTES_PER_S
        assert one.limit_s is None or 0 <= one.limit_s <= MAX_SECONDS_TO_LIMIT
    assert (
        len(make_slow_leak_condition(ConditionType.SLOW_LEAK, {"p": metrics}).message)
        <= MAX_MESSAGE_CHARS
    )
