"""Recommend leak budgets for ``plimsoll tune``, from a journal, trace or series.

The formulas are those of ``growthBudget: Auto`` in :mod:`plimsoll_sidecar.govern.auto_budget`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path

import msgspec

from plimsoll_api import trace
from plimsoll_api.assessment import BudgetState
from plimsoll_api.learned import LEARNED_WINDOWS_H
from plimsoll_api.memory_contract import make_memory_contract, make_memory_needs
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy, parse_growth_budget
from plimsoll_api.supervision import Supervision
from plimsoll_api.times import parse_rfc3339
from plimsoll_api.trace import TraceError
from plimsoll_api.units import format_bytes, format_duration
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.govern.auto_budget import (
    HOURS_PER_DAY,
    SECONDS_PER_HOUR,
    HourGrowth,
    LearnedBudgets,
    LearnedHistory,
    compute_quantile,
    list_growth_within,
    propose_budget,
    select_healthy_hours,
)
from plimsoll_sidecar.govern.command import Result
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.replay import make_engine_view, make_memory_policy, make_unknown_results

UNIX_EPOCH_DATE = date(1970, 1, 1)
MAX_SERIES_LINES = 10_000_000
# The memory of a series fell to at most this share of its size, so the program has restarted.
MAX_SIZE_SHARE_AFTER_RESTART = 0.5


class DayGrowth(msgspec.Struct, kw_only=True):
    """Growth on one past day, in UTC.

    Attributes:
        date: The date in ISO 8601.
        observed_s: The observed seconds.
        gain: The largest growth within the window of the budget, in bytes.
        incident: Whether there was a confirmed incident on this day.
        spends: Whether the growth exceeded the proposed budget.

    """

    date: str
    observed_s: float
    gain: int
    incident: bool
    spends: bool


class Tuning(msgspec.Struct, kw_only=True):
    """Growth of host or device memory, and the leak budget to set for it. Sizes are in bytes.

    Values that need a healthy hour are None without one.

    Attributes:
        memory: ``host`` or ``device``.
        revision: The revision of the workload.
        observed_s: The observed seconds.
        starts: The sizes after the newest warm-ups.
        limit: The memory limit; None if unknown.
        level: The 99th percentile of the growth within 1h, 6h and 24h, by this window.
        usual: The 99th percentile of the growth within the window of the budget.
        window_s: The window of the budget in seconds.
        in_force: The budget that the replica has learned; None without one.
        proposal: The budget to set.
        recommendation: A sentence about the memory that the revision needs.
        request: The memory request to set for the engine's container.
        memory_limit: The memory limit to set for the engine's container.
        days: The growth on each past day.

    """

    memory: str
    revision: str
    observed_s: float
    starts: list[int]
    limit: int | None
    level: dict[str, int]
    usual: int | None
    window_s: float
    in_force: int | None
    proposal: int | None
    recommendation: str | None
    request: int | None
    memory_limit: int | None
    days: list[DayGrowth]


def make_tunings(learned: LearnedBudgets, memory: MemoryPolicy) -> list[Tuning]:
    """Return the tuning of each kind of memory that was observed."""
    pairs = (("host", learned.host, memory.host), ("device", learned.device, memory.device))
    return [
        make_memory_tuning(name, history, budget or parse_growth_budget("Auto"))
        for name, history, budget in pairs
        if history.hours
    ]


def make_memory_tuning(memory_kind: str, learned: LearnedHistory, budget: MemoryBudget) -> Tuning:
    """Return the tuning of the memory ``memory_kind``, "host" or "device"."""
    clean = select_healthy_hours(learned.hours)
    proposal = propose_budget(learned, budget)
    if proposal is not None:
        proposal = max(proposal, budget.minimum_bytes or 1)
    levels = {
        f"{hours}h": quantile
        for hours in LEARNED_WINDOWS_H
        if (quantile := compute_quantile(list_growth_within(clean, hours * SECONDS_PER_HOUR)))
        is not None
    }
    needed = learned.find_largest_size()
    recommendation = None
    if needed is not None:
        needs = make_memory_needs(memory_kind, needed, learned.find_limit(budget), ())
        recommendation = make_memory_contract(
            memory_kind, [needs], [], proposal or budget.growth_bytes
        )
    return Tuning(
        memory=memory_kind,
        revision=learned.revision,
        observed_s=learned.observed_s,
        starts=learned.starts,
        limit=learned.find_limit(budget),
        level=levels,
        usual=compute_quantile(list_growth_within(clean, budget.window_s)),
        window_s=budget.window_s,
        in_force=learned.budget,
        proposal=proposal,
        recommendation=recommendation.text if recommendation else None,
        request=recommendation.request if recommendation else None,
        memory_limit=recommendation.limit if recommendation else None,
        days=list(_iterate_days(learned.hours, budget.window_s, proposal)),
    )


def explain_unsuitable_budgets(learned: LearnedBudgets, memory: MemoryPolicy) -> list[str]:
    """Return a sentence for each budget that is too small or too large.

    A budget is too small if it is less than the usual growth, and too large if it exceeds the
    headroom between the size after a start and the limit.
    """
    sentences = []
    budgets = {"host": memory.host, "device": memory.device}
    for tuning in make_tunings(learned, memory):
        budget = budgets[tuning.memory]
        if budget is None or budget.auto:
            continue
        field = f"spec.memory.{tuning.memory}.growthBudget {format_bytes(budget.growth_bytes)}"
        if tuning.usual is not None and budget.growth_bytes < tuning.usual:
            sentences.append(
                f"{field} is less than the {format_bytes(tuning.usual)} that a healthy replica "
                f"gains in {format_duration(budget.window_s)}: run plimsoll tune, or set Auto"
            )
        headroom = None if tuning.limit is None else tuning.limit - max(tuning.starts, default=0)
        if headroom is not None and budget.growth_bytes > headroom:
            sentences.append(
                f"{field} is larger than the {format_bytes(max(0, headroom))} between the "
                "size after a start and the memory limit: lower the budget, or raise the "
                "limit"
            )
    return sentences


def _iterate_days(
    hours: list[HourGrowth], window_s: float, proposal: int | None
) -> Iterator[DayGrowth]:
    by_day: dict[int, list[HourGrowth]] = {}
    for hour in hours:
        by_day.setdefault(hour.at // HOURS_PER_DAY, []).append(hour)
    for day, day_hours in sorted(by_day.items()):
        gain = max(list_growth_within(day_hours, window_s))
        yield DayGrowth(
            date=(UNIX_EPOCH_DATE + timedelta(days=day)).isoformat(),
            observed_s=sum(hour.seen_s for hour in day_hours),
            gain=gain,
            incident=any(hour.incident for hour in day_hours),
            spends=proposal is not None and gain > proposal,
        )


def learn_from_trace(path: Path) -> tuple[LearnedBudgets, MemoryPolicy]:
    """Return what a supervisor would have learned from a trace. Raises ValueError."""
    try:
        header, samples = trace.read(path)
        memory = make_memory_policy(path, header)
        start = parse_rfc3339(header.started_at) if header.started_at else 0.0
        revision = f"{header.engine.model} {header.engine.version}"
        learned, first = LearnedBudgets(), None
        detector = Detector(memory, math.inf, header.interval_s)
        governor = Governor(Supervision(), memory, replica=header.name)
        results: list[Result] = []
        for sample in samples:
            first = sample.t if first is None else first
            now = start + sample.t - first
            assessment = detector.update(sample)
            turn = governor.advance(assessment, make_engine_view(sample), now, results)
            results = make_unknown_results(turn)
            learned.observe(
                now, str(sample.epoch), revision, assessment, governor.list_growing_kinds()
            )
    except TraceError as error:
        raise ValueError(str(error)) from None
    return learned, memory


def learn_from_series(path: Path, limit_bytes: int | None) -> LearnedBudgets:
    """Return what a supervisor would have learned from a series of memory sizes.

    Each line of the CSV file has a time in Unix seconds and a size in bytes, in order of time.
    Other
    lines are skipped. Raises OSError, and ValueError without such a line.
    """
    learned = LearnedBudgets()
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        points = list(_parse_points(lines))
    if not points:
        raise ValueError(
            f"{path} has no line with a time in Unix seconds and a size in bytes, such as "
            "1700000000,2147483648"
        )
    begin, number = 0, 0
    for index, (_, size) in enumerate(points):
        after = points[index + 1][1] if index + 1 < len(points) else 0
        if after >= MAX_SIZE_SHARE_AFTER_RESTART * size and index + 1 < len(points):
            continue
        life = points[begin : index + 1]
        base = min(size for time, size in life if time <= life[0][0] + SECONDS_PER_HOUR)
        for at, size_bytes in life:
            state = BudgetState(
                current=size_bytes,
                baseline=base,
                unexplained=max(0, size_bytes - base),
                limit=limit_bytes,
            )
            learned.host.observe(at, str(number), "", state, False)
        begin, number = index + 1, number + 1
    return learned


def _parse_points(lines: Iterable[str]) -> Iterator[tuple[float, int]]:
    last = -math.inf
    for number, row in enumerate(csv.reader(lines)):
        if number >= MAX_SERIES_LINES:
            return
        try:
            at, size = float(row[0]), float(row[1])
        except (ValueError, IndexError):
            continue
        if math.isfinite(at) and at > last and 0 <= size < 2**62:
            last = at
            yield at, int(size)
