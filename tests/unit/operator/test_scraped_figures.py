"""Any answer of a pod to a scrape becomes figures within bounds, or unknown.

Tests ``plimsoll_operator/scraper.py`` and ``fleet/supervisor_metrics.py``.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.growth import ReportedGrowth
from plimsoll_operator.fleet.supervisor_metrics import (
    MAX_CONSUMED_RATIO,
    MAX_RESTARTS,
    UNKNOWN_SIGNAL_REASON,
    SupervisorMetrics,
    count_drained,
    make_memory_status,
    parse_metrics_page,
)
from plimsoll_operator.kinds import Key
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.scraper import MAX_PAGE_BYTES, Scraper, find_address
from plimsoll_operator.status.service import make_metric_fields

RATIO = b'plimsoll_memory_budget_consumed_ratio{kind="host"} '
LEFT = b"plimsoll_restart_budget_remaining "
GROWTH = (
    b'plimsoll_memory_unexplained_bytes{kind="host"} ',
    b'plimsoll_memory_baseline_age_seconds{kind="host"} ',
    b'plimsoll_memory_baseline_requests{kind="host"} ',
)
INT64 = 2**63

NUMBERS = st.one_of(
    st.floats().map(lambda value: repr(value).encode()),
    st.integers().map(lambda value: b"%d" % value),
    st.sampled_from([b"+Inf", b"-Inf", b"NaN", b"1e999", b"1_0", b"0x10", b"", b"9" * 5000]),
    st.binary(max_size=40),
)
LINES = st.one_of(
    st.builds(
        bytes.__add__,
        st.sampled_from([RATIO, LEFT, RATIO.replace(b"host", b"device"), *GROWTH]),
        NUMBERS,
    ),
    st.builds(
        lambda labels, value: b"plimsoll_memory_budget_consumed_ratio{" + labels + b"} " + value,
        st.binary(max_size=60),
        NUMBERS,
    ),
    st.binary(max_size=200),
)
PAGES = st.one_of(
    st.lists(LINES, max_size=20).map(b"\n".join),
    st.binary(max_size=2000),
    st.text(max_size=500).map(lambda text: text.encode("utf-16")),
)


@pytest.mark.parametrize(
    ("page", "is_drained"),
    [
        (b'plimsoll_supervisor_out_of_service{reason="manual"} 1.0', True),
        (b'plimsoll_supervisor_out_of_service{reason="manual"} 0.0', False),
        (b'plimsoll_supervisor_out_of_service{reason="restart"} 1.0', None),
        (b'plimsoll_supervisor_out_of_service{reason="manual"} 7', None),
        (b"", None),
    ],
)
def test_what_a_person_drained_is_known_or_not(page: bytes, is_drained: bool | None) -> None:
    assert parse_metrics_page(page).drained is is_drained


def test_drained_replicas_are_counted_among_those_that_are_known() -> None:
    some = {
        "a": SupervisorMetrics(drained=True),
        "b": SupervisorMetrics(drained=False),
        "c": SupervisorMetrics(),
    }
    assert count_drained(some) == 1
    assert count_drained({"c": SupervisorMetrics()}) is None
    before = {"drained": 2, "memory": {"replica": "a"}}
    assert make_metric_fields(before, None) == before
    assert make_metric_fields(before, some) == {"drained": 1}


@given(PAGES)
def test_figures_of_any_page_fit_a_status(page: bytes) -> None:
    found = parse_metrics_page(page)
    for ratio in (found.host, found.device):
        assert ratio is None or 0 <= ratio <= MAX_CONSUMED_RATIO
    assert found.restarts_left is None or 0 <= found.restarts_left <= MAX_RESTARTS
    for growth in (found.host_growth, found.device_growth):
        data = msgspec.json.encode(growth)
        assert msgspec.json.decode(data, type=ReportedGrowth | None) == growth
    shown = make_memory_status({"pod": found})
    for field in ("hostConsumedPercent", "deviceConsumedPercent"):
        value = shown.get(field, 0)
        assert isinstance(value, int)
        assert 0 <= value < INT64


@pytest.mark.parametrize(
    "value",
    [b"+Inf", b"-Inf", b"NaN", b"1e999", b"-0.5", b"1e10", b"9" * 5000, b"1_000", "٣".encode()],
)
def test_a_value_that_no_supervisor_writes_is_unknown(value: bytes) -> None:
    assert parse_metrics_page(RATIO + value + b"\n" + LEFT + value) == SupervisorMetrics()


def test_a_drain_is_published_at_once() -> None:
    """Figures that move with every sample wait for their minute; what a person did does not."""
    changed: list[Key] = []
    scraper = Scraper(Store(), changed.append, clock=lambda: 0.0)
    key = Key("ml", "qwen")
    for metrics in (
        SupervisorMetrics(0.1),
        SupervisorMetrics(0.2),
        SupervisorMetrics(0.3, drained=True),
        SupervisorMetrics(0.4),
    ):
        scraper.publish(key, {"qwen-0": metrics})
    assert (len(changed), scraper.count_drained_pods()) == (2, {key: 1})
    scraper.publish(key, {})
    assert (len(changed), scraper.count_drained_pods()) == (2, {key: 1}), "no answer is no resume"
    scraper.publish(key, {"qwen-0": SupervisorMetrics(0.5, drained=False)})
    assert (len(changed), scraper.count_drained_pods()) == (3, {key: 0})


AGE, MISSING = "plimsoll_signal_age_seconds", "plimsoll_supervisor_signal_missing"


@pytest.mark.parametrize(
    ("age", "reason", "unseen"),
    [
        ("3.5", "EngineSilent", ()),
        ("121", "EngineSilent", (("engine", "EngineSilent"),)),
        ("121", "of-a-pod\\n", (("engine", UNKNOWN_SIGNAL_REASON),)),
        ("NaN", "EngineSilent", ()),
    ],
)
def test_what_a_supervisor_has_not_seen_for_two_minutes_is_unseen(
    age: str, reason: str, unseen: tuple[tuple[str, str], ...]
) -> None:
    page = f'{AGE}{{signal="engine"}} {age}\n{MISSING}{{reason="{reason}",signal="engine"}} 1.0\n'
    page += f'{AGE}{{signal="host"}} 1\n'
    found = parse_metrics_page(page.encode())
    assert (found.missing_signals, found.is_blind) == (unseen, bool(unseen))
    unknown = parse_metrics_page(page.replace("signal=", "s=").encode())
    assert (unknown.missing_signals, unknown.is_blind) == (None, False)


def test_a_metrics_page_that_cannot_be_used_is_unseen_but_the_engine_is_not() -> None:
    page = f'{AGE}{{signal="engine"}} 1\n{AGE}{{signal="metrics"}} 300\n'
    page += f'{MISSING}{{reason="MetricsUnauthorized",signal="metrics"}} 1.0\n'
    found = parse_metrics_page(page.encode())
    assert (found.missing_signals, found.is_blind) == ((("metrics", "MetricsUnauthorized"),), False)


def test_a_signal_that_is_lost_or_memory_near_its_limit_is_published() -> None:
    clock = [0.0]
    changed: list[Key] = []
    scraper = Scraper(Store(), changed.append, clock=lambda: clock[0])
    lost, near = (
        SupervisorMetrics(missing_signals=(("metrics", "MetricsMissing"),)),
        SupervisorMetrics(missing_signals=(), limit=0.97),
    )
    for number, metrics in enumerate(
        (SupervisorMetrics(missing_signals=()), lost, lost, near, near)
    ):
        clock[0] = 1000.0 * number
        scraper.publish(Key("ml", "qwen"), {"qwen-0": metrics})
    assert len(changed) == 3


def test_half_a_restart_is_unknown_and_the_last_sample_counts() -> None:
    assert parse_metrics_page(LEFT + b"2.5") == SupervisorMetrics()
    assert parse_metrics_page(RATIO + b"0.5\n" + RATIO + b"+Inf") == SupervisorMetrics()
    assert parse_metrics_page(RATIO + b"+Inf\n" + RATIO + b"0.5\r\n") == SupervisorMetrics(host=0.5)


def test_growth_is_known_as_a_whole_or_not_at_all() -> None:
    size, age, requests = GROWTH
    whole = [size + b"1048576.0", age + b"61.7", requests + b"9"]
    assert parse_metrics_page(b"\n".join(whole)) == SupervisorMetrics(
        host_growth=ReportedGrowth(1 << 20, 61, 9)
    )
    for index in range(3):
        assert (
            parse_metrics_page(b"\n".join(whole[:index] + whole[index + 1 :]))
            == SupervisorMetrics()
        )
        odd = [*whole, GROWTH[index] + b"1e18"]
        assert parse_metrics_page(b"\n".join(odd)) == SupervisorMetrics()


@pytest.mark.parametrize(
    "unit",
    [
        RATIO + b"1\n",
        b"plimsoll_memory_budget_consumed_ratio{" * 3,
        b'plimsoll_memory_budget_consumed_ratio{kind="host",' + b" " * 500,
        b"plimsoll_restart_budget_remaining" + b" " * 100 + b"\n",
        b"\n",
        b"x",
    ],
)
def test_the_longest_page_takes_no_quadratic_time(unit: bytes) -> None:
    page = (unit * (MAX_PAGE_BYTES // len(unit) + 1))[:MAX_PAGE_BYTES]
    began = time.process_time()
    parse_metrics_page(page)
    assert time.process_time() - began < 5  # quadratic time would take minutes


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("fd00::1", "[fd00::1]"),
        ("127.0.0.1", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("169.254.169.254", None),
        ("fe80::1%eth0", None),
        ("fd00::1%25eth0", None),
        ("0.0.0.0", None),
        ("224.0.0.1", None),
        ("evil.example/x?", None),
        ("10.1.2.3:80@evil", None),
        ("", None),
        (None, None),
    ],
)
def test_only_a_pods_own_address_is_scraped(address: Any, asked: str | None) -> None:
    assert find_address({"status": {"phase": "Running", "podIP": address}}) == asked
    assert find_address({"status": {"phase": "Pending", "podIP": address}}) is None
    assert find_address({}) is None


def test_growth_is_as_new_as_the_last_round_and_changes_no_status() -> None:
    changed: list[Key] = []
    scraper, key = Scraper(Store(), changed.append), Key("ml", "qwen")
    assert scraper.get_latest(key) == {}
    scraper.publish(key, {"qwen-0": SupervisorMetrics(host=0.1)})
    grown = SupervisorMetrics(host=0.1, host_growth=ReportedGrowth(1 << 20, 60, 7))
    scraper.publish(key, {"qwen-0": grown})
    assert scraper.get_latest(key) == {"qwen-0": grown}
    assert changed == [key], "once, for the share of the budget"
    scraper.forget(key)
    assert scraper.get_latest(key) == {}
