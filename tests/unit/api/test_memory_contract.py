"""The memory contract of a revision, in a sentence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.admin import LedgerEntry, MemoryKind
from plimsoll_api.growth import MAX_REPORTED_BYTES, ReportedGrowth
from plimsoll_api.memory_contract import (
    ROUNDING_STEP_BYTES,
    MemoryNeeds,
    format_quantity,
    make_memory_contract,
    make_memory_needs,
)
from plimsoll_api.units import parse_bytes

GIB = 1 << 30
DAY_S = 86400


def test_it_says_what_a_revision_needs_and_how_long_the_limit_lasts() -> None:
    needs = MemoryNeeds(int(17.2 * GIB), 14 * GIB, int(13.8 * GIB), 32 * GIB)
    grown = ReportedGrowth(int(1.6 * GIB), DAY_S, int(1.6 * GIB / 1434))
    found = make_memory_contract("host", [needs], [grown], 2 * GIB, 10 * GIB)
    assert found.text == (
        "host memory needs 17.2 GiB at the current load; the request of 10.0 GiB is too small;"
        " it needs 31.0 GiB when its declared pools (14.0 GiB) are full; it grows by 1.4 KiB per"
        " request; it reaches the limit in 9 days at the current traffic"
    )
    assert (format_quantity(found.request), format_quantity(found.limit)) == ("17664Mi", "33Gi")


def test_it_says_nothing_that_is_not_known() -> None:
    found = make_memory_contract(
        "device", [MemoryNeeds(61 * GIB)], [ReportedGrowth(9 << 20, 60, 999)], 0
    )
    assert found.text == "device memory needs 61.0 GiB at the current load"


def test_a_limit_below_what_the_pools_will_take_is_too_small() -> None:
    found = make_memory_contract(
        "host", [MemoryNeeds(8 * GIB, 12 * GIB, 6 * GIB, 12 * GIB)], [], GIB, 8 * GIB
    )
    assert "the limit of 12.0 GiB is too small" in found.text
    assert found.limit == 15 * GIB


def test_growth_that_would_take_years_is_not_mentioned() -> None:
    grown = ReportedGrowth(1 << 20, 30 * DAY_S, 10_000_000)
    text = make_memory_contract("host", [MemoryNeeds(8 * GIB, limit=16 * GIB)], [grown], 0).text
    assert text == "host memory needs 8.0 GiB at the current load"


def test_a_replica_that_shrinks_does_not_reach_its_limit() -> None:
    grown = ReportedGrowth(-GIB, DAY_S, 10_000)
    text = make_memory_contract("host", [MemoryNeeds(8 * GIB, limit=16 * GIB)], [grown], 0).text
    assert text == "host memory needs 8.0 GiB at the current load"


def test_the_worst_replica_counts() -> None:
    replicas = [MemoryNeeds(8 * GIB, 6 * GIB, 6 * GIB, 32 * GIB), MemoryNeeds(9 * GIB)]
    found = make_memory_contract("host", replicas, [], 0)
    assert found.text.startswith("host memory needs 9.0 GiB at the current load; it needs 14.0 GiB")
    assert (found.request, found.limit) == (9 * GIB, 14 * GIB)


def test_pools_are_those_with_a_bound_in_the_same_memory() -> None:
    ledger = [
        LedgerEntry("kv", MemoryKind.DEVICE, 40 * GIB, 60 * GIB),
        LedgerEntry("offload", MemoryKind.HOST, GIB, 8 * GIB),
        LedgerEntry("tables", MemoryKind.HOST, GIB),
        LedgerEntry("over", MemoryKind.HOST, 3 * GIB, 2 * GIB),
    ]
    assert make_memory_needs("host", 9 * GIB, None, ledger) == MemoryNeeds(
        9 * GIB, 10 * GIB, 7 * GIB
    )
    assert make_memory_needs("device", GIB, None, ledger) == MemoryNeeds(GIB, 60 * GIB, 20 * GIB)


SIZES = st.integers(0, MAX_REPORTED_BYTES)
NEEDS = st.builds(MemoryNeeds, SIZES, SIZES, SIZES, st.none() | SIZES)
GROWN = st.builds(ReportedGrowth, SIZES, st.integers(0, 1 << 32), st.integers(0, 1 << 53))


@given(st.lists(NEEDS, min_size=1, max_size=3), st.lists(GROWN, max_size=3), SIZES)
def test_whatever_replicas_say_the_amounts_hold_it_and_the_sentence_is_short(
    needs: list[MemoryNeeds], grown: list[ReportedGrowth], budget: int
) -> None:
    found = make_memory_contract("host", needs, grown, budget, 1)
    assert len(found.text) < 400
    assert max(one.level for one in needs) <= found.request <= found.limit + ROUNDING_STEP_BYTES
    for size in (found.request, found.limit):
        assert size % ROUNDING_STEP_BYTES == 0
        assert parse_bytes(format_quantity(size)) == size
