"""Owners that are declared late, or not all the time: their memory was there before.

Tests ``detect/attribution.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from leaklab.series import GIB, MIB, Series, steady, step
from plimsoll_api.assessment import Assessment
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import LedgerLine, Sample
from plimsoll_sidecar.detect.attribution import MAX_OWNERS, LedgerAccount
from plimsoll_sidecar.detect.detector import Detector

POLICY = MemoryPolicy(host=MemoryBudget(256 * MIB, 3600.0), warmup_s=60.0)
RATE = 2 * MIB
SOON_S = 0.7 * 256 * MIB / RATE
"""A leak is believed while at least three tenths of its budget are left."""
Ledger = Callable[[float], list[LedgerLine]]


def pool(size: int = GIB, bound: int | None = None) -> LedgerLine:
    return LedgerLine("kv_cache", "host", size, size if bound is None else bound)


def samples(series: Series, ledger: Ledger) -> Iterator[Sample]:
    for sample in series.samples():
        sample.ledger = ledger(sample.t) or None
        yield sample


def believed(series: Series, ledger: Ledger) -> tuple[float | None, list[Assessment]]:
    """When a growth was first believed, and every view."""
    detector, views, at = Detector(POLICY, 60.0, 1.0), [], None
    for sample in samples(series, ledger):
        views.append(detector.update(sample))
        if at is None and any(s.unconfirmed is None for s in views[-1].suspicions):
            at = sample.t
    return at, views


CACHE = LedgerLine("prefix_cache", "host", MIB, 64 * MIB)


@pytest.mark.parametrize("seen_at", [65.0, 100.0, 139.0])
def test_a_pool_that_is_declared_after_the_warm_up_hides_no_leak(seen_at: float) -> None:
    """As vLLM's Worker did: its pool of 1 GiB, and growth was below zero from then on."""
    series = Series(duration=220, leak=steady(RATE, 140))
    at, views = believed(series, lambda t: [CACHE, pool()] if t >= seen_at else [CACHE])
    assert at is not None
    assert at - 140 <= SOON_S
    host = views[-1].host
    assert host is not None
    assert host.unexplained is not None
    assert host.unexplained > 0.85 * RATE * 80


def test_a_pool_explains_at_most_what_had_grown_when_it_was_first_seen() -> None:
    series = Series(duration=260, leak=steady(RATE, 140))
    at, views = believed(series, lambda t: [CACHE, pool()] if t >= 150 else [CACHE])
    assert at is not None
    assert at - 150 <= 90
    host = views[-1].host
    assert host is not None
    assert host.explained is not None
    assert 0 < host.explained < 2 * RATE * 10 + 16 * MIB


@pytest.mark.parametrize(
    "away",
    [lambda t: [CACHE], lambda t: [CACHE, pool(GIB // 2)]],
    ids=["the process is silent", "one of two ranks is silent"],
)
def test_a_pool_that_is_away_and_comes_back_hides_no_leak(away: Ledger) -> None:
    def ledger(t: float) -> list[LedgerLine]:
        return away(t) if 120 <= t < 150 or 165 <= t < 170 else [CACHE, pool()]

    at, views = believed(Series(duration=220, leak=steady(RATE, 140)), ledger)
    assert at is not None
    assert at - 140 <= SOON_S
    host = views[-1].host
    assert host is not None
    assert host.explained == 0


def test_a_bound_that_rises_later_hides_no_leak() -> None:
    def ledger(t: float) -> list[LedgerLine]:
        return [CACHE, pool(GIB, GIB // 4 if t < 130 else GIB)]

    at, _ = believed(Series(duration=220, leak=steady(RATE, 140)), ledger)
    assert at is not None
    assert at - 140 <= SOON_S


def test_a_cache_that_comes_with_its_memory_is_explained() -> None:
    """It is made, and declared, at the first request that needs it."""
    made = Series(duration=400, other=step(150 * MIB, 150))
    size = LedgerLine("adapters", "host", 150 * MIB, 150 * MIB)
    _, views = believed(made, lambda t: [CACHE, size] if t >= 150 else [CACHE])
    assert not any(view.suspicions for view in views)
    host = views[-1].host
    assert host is not None
    assert host.explained is not None
    assert host.explained > 130 * MIB


def test_a_cache_that_fills_is_explained_from_its_first_byte_on() -> None:
    made = Series(duration=400, other=steady(MIB / 2, 130))

    def ledger(t: float) -> list[LedgerLine]:
        filled = int(max(0.0, t - 130) * MIB / 2)
        return [LedgerLine("adapters", "host", filled, GIB)] if t >= 160 else [CACHE]

    _, views = believed(made, ledger)
    host = views[-1].host
    assert host is not None
    assert host.unexplained is not None
    assert host.unexplained < 25 * MIB


def test_what_was_there_before_is_remembered_over_a_restart_of_the_supervisor() -> None:
    first, second = Detector(POLICY, 60.0, 1.0), Detector(POLICY, 60.0, 1.0)
    series = Series(duration=260, leak=steady(RATE, 140))
    resumed = is_believed = False
    for sample in samples(series, lambda t: [CACHE, pool()] if t >= 120 else [CACHE]):
        if sample.t < 150:
            first.update(sample)
            continue
        last = second.update(sample)
        is_believed = is_believed or any(one.unconfirmed is None for one in last.suspicions)
        if not resumed:
            second.resume(first.make_checkpoint())
            resumed = True
    assert last.host is not None
    assert last.host.unexplained is not None
    assert last.host.unexplained > 0.85 * RATE * 120
    assert is_believed


def test_a_cache_that_fills_while_its_process_is_silent_is_explained_once_it_reports() -> None:
    """The growth of this time is new, unlike the memory of an owner that was never declared."""
    account, mine = LedgerAccount("host"), [LedgerLine("prefix_cache", "host", 10 * MIB, GIB)]
    account.explain(mine, lambda known: 0)
    before = account.explain(mine, lambda known: 0)
    assert account.explain([], lambda known: 0) == before
    mine[0].bytes = 50 * MIB
    assert account.explain(mine, lambda known: 0) == before + 40 * MIB


def test_owners_without_end_take_no_memory_without_end() -> None:
    account = LedgerAccount("host")
    for number in range(1000):
        account.explain([LedgerLine(f"o{number}", "host", 1, 1)], lambda known: 0)
    assert len(account.owners) <= 64


def test_owners_beyond_the_most_that_are_followed_explain_nothing() -> None:
    """They came in one ledger, and all of them were kept."""
    account = LedgerAccount("host")
    many = [LedgerLine(f"owner-{number}", "host", MIB, MIB) for number in range(5000)]
    for _ in range(2):
        assert account.explain(many, lambda known: 1 << 60) == MAX_OWNERS * MIB
        assert sorted(account.owners) == sorted(one.owner for one in many[:MAX_OWNERS])
    later = [LedgerLine("later", "host", MIB, MIB)]
    account.explain([*many[:MAX_OWNERS], *later], lambda known: 1 << 60)
    assert "later" not in account.owners
