"""Learn ``Auto`` budgets from the growth of healthy replicas, without I/O.

The budget for a window is 1.5 times the 99th percentile of the hourly growth. It has a minimum and
a maximum. Hours within a day of a confirmed incident do not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from plimsoll_api.admin import LedgerEntry
from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.learned import (
    LEARNED_WINDOWS_H,
    MAX_OBSERVED_H,
    MAX_OBSERVED_S,
    LearnedMemory,
    LearnedWorkload,
    compute_stepped_budget,
)
from plimsoll_api.memory_contract import MemoryNeeds, make_memory_needs
from plimsoll_api.memory_policy import (
    AutoBudgets,
    MemoryBudget,
    MemoryPolicy,
    compute_provisional_budget,
)

SECONDS_PER_HOUR = 3600.0
HOURS_PER_DAY = 24
MAX_STORED_STARTS = 8
# Two samples may be missing in a recording with one sample a minute.
MAX_SAMPLE_GAP_S = 180.0
# The factors were chosen, not fitted. On 1,480 h of production containers, budgets learned in
# twelve hours would have caused 15 suspicions. Budgets learned in one hour would have caused 25.
BUDGET_FACTOR = 1.5
GROWTH_QUANTILE = 0.99
MIN_SHARE_OF_LIMIT = 0.03
# The minimum if no limit is known is 3 % of 2 GiB.
MIN_BUDGET_BYTES = 64 << 20
MAX_SHARE_OF_HEADROOM = 0.5
# A new budget makes the detector discard its trends, so it applies only after such a change.
MIN_RELATIVE_CHANGE = 0.05
MAX_REVISION_CHARS = 200
GROWTH_KINDS = {"host": IncidentKind.HOST_GROWTH, "device": IncidentKind.DEVICE_GROWTH}


class HourGrowth(msgspec.Struct, array_like=True):
    """Growth of host or device memory in one hour.

    Attributes:
        at: The number of the hour since 1970.
        seen_s: The observed seconds of the hour.
        gains: The largest growth in bytes over each window of :data:`LEARNED_WINDOWS_H` that ends
        in the hour.
        incident: Whether a confirmed incident of this kind of memory was open or in its cooldown.
        most: The largest size of the memory in the hour, in bytes.

    """

    at: int
    seen_s: float = 0.0
    gains: tuple[int, int, int] = (0, 0, 0)
    incident: bool = False
    most: int = 0


class LearnedHistory(msgspec.Struct, omit_defaults=True):
    """History of one kind of memory of a replica, and its budget in force.

    Sizes are in bytes.

    Attributes:
        revision: The revision of the workload.
        epoch: The current epoch of the engine.
        hours: The observed hours of the revision, oldest first.
        lows: The number and the lowest growth of each hour in the current ``epoch``.
        starts: The sizes after the newest warm-ups.
        limit: The newest known memory limit; None if none is known.
        observed_s: The observed seconds in this and earlier revisions.
        budget: The budget in force; None until one has been learned.
        budget_at: The number of the hour in which ``budget`` was set.
        seen_at: The time of the newest sample, in Unix seconds.
        inherited: What the workload's other replicas had learned before; None if nothing was
            inherited.

    """

    revision: str = ""
    epoch: str = ""
    hours: list[HourGrowth] = []
    lows: list[tuple[int, int]] = []
    starts: list[int] = []
    limit: int | None = None
    observed_s: float = 0.0
    budget: int | None = None
    budget_at: int = 0
    seen_at: float = 0.0
    inherited: LearnedMemory | None = None

    def observe(
        self,
        now: float,
        epoch: str,
        revision: str,
        budget_state: BudgetState | None,
        has_incident: bool,
    ) -> None:
        """Add a sample at ``now`` (Unix seconds). A new ``revision`` restarts the learning."""
        at = int(now // SECONDS_PER_HOUR)
        epoch, revision = epoch[:MAX_REVISION_CHARS], revision[:MAX_REVISION_CHARS]
        if _is_same_revision(revision, self.revision):
            self.revision = max(revision, self.revision)
        else:
            # The next revision starts with the budget in force.
            if self.revision:
                self.inherited = None
            self.revision, self.hours, self.starts = revision, [], []
        began = epoch != self.epoch
        if began:
            self.epoch, self.lows = epoch, []
        if not self.hours or self.hours[-1].at != at:
            self.lows = [low for low in self.lows if at - HOURS_PER_DAY <= low[0] <= at]
            self.hours = [hour for hour in self.hours if at - MAX_OBSERVED_H < hour.at <= at]
        grown = budget_state.unexplained if budget_state is not None else None
        if grown is None and not has_incident:
            return
        if not self.hours or self.hours[-1].at != at:
            self.hours.append(HourGrowth(at))
        hour = self.hours[-1]
        hour.incident = hour.incident or has_incident
        if budget_state is None or grown is None:
            return
        if not self.lows and budget_state.baseline is not None:
            self.starts = [*self.starts, budget_state.baseline][-MAX_STORED_STARTS:]
        self.limit = budget_state.limit if budget_state.limit is not None else self.limit
        passed = now - self.seen_at
        self.seen_at = now
        if 0 < passed <= MAX_SAMPLE_GAP_S:
            self.observed_s += passed
            hour.seen_s = min(SECONDS_PER_HOUR, hour.seen_s + passed)
        if self.lows and self.lows[-1][0] == at:
            grown_least = min(self.lows.pop()[1], grown)
        else:
            grown_least = grown
        self.lows.append((at, grown_least))
        gains = (grown - find_lowest_growth(self.lows, at - window) for window in LEARNED_WINDOWS_H)
        first, second, third = map(max, hour.gains, gains)
        hour.gains = (first, second, third)
        hour.most = max(hour.most, budget_state.current or 0)

    def update_budget(self, now: float, budget: MemoryBudget, auto: AutoBudgets) -> bool:
        """Update the budget at most once an hour, and report whether it may have changed."""
        at = int(now // SECONDS_PER_HOUR)
        if self.budget is None:
            if not self.is_learned(auto):
                return False
            self.budget = self._compute_first_budget(budget)
        elif at != self.budget_at:
            proposal = (
                propose_budget(self, budget)
                if sum_healthy_s(self.hours) >= auto.learning_s
                else None
            )
            # The clock may have been set back, also while the supervisor was down.
            days = max(0, at - self.budget_at) / HOURS_PER_DAY if self.budget_at else 0.0
            if proposal is not None:
                self.budget = compute_stepped_budget(self.budget, proposal, days)
        else:
            return False
        self.budget_at = at
        return True

    def is_learned(self, auto: AutoBudgets) -> bool:
        """Report whether the observations, with inherited ones, suffice to act on growth."""
        seen_s = self.observed_s
        if self.inherited is not None:
            if self.inherited.budget is not None:
                return True
            seen_s += self.inherited.seen_s
        return self.budget is not None or seen_s >= auto.learning_s

    def _compute_first_budget(self, budget: MemoryBudget) -> int:
        limit = self.find_limit(budget)
        if self.inherited is not None and self.inherited.budget is not None:
            start = max(self.starts, default=self.inherited.start)
            return clamp_budget(self.inherited.budget, limit, start)
        proposal = propose_budget(self, budget)
        return compute_provisional_budget(limit) if proposal is None else proposal

    def inherit(self, inherited: LearnedMemory | None) -> None:
        """Use what other replicas have learned, until this replica has a budget of its own."""
        if inherited is None or self.budget is not None or inherited == self.inherited:
            return
        if not self.hours:
            self.inherited = inherited
        elif inherited.budget is not None:
            # The growth of this replica may be included, and must not count twice.
            self.inherited = LearnedMemory(start=inherited.start, budget=inherited.budget)

    def list_healthy_hours(self) -> list[HourGrowth]:
        """Return the healthy hours. Inherited values count as one more hour."""
        hours = select_healthy_hours(self.hours)
        if self.inherited is not None and self.inherited.seen_s:
            hours.append(HourGrowth(0, float(self.inherited.seen_s), self.inherited.gains))
        return hours

    def find_largest_size(self) -> int | None:
        """Return the largest size in healthy hours, in bytes; None if unknown."""
        return max((hour.most for hour in select_healthy_hours(self.hours)), default=0) or None

    def make_report(self, auto: AutoBudgets) -> LearnedMemory | None:
        """Return what other replicas may inherit; None before the first hour."""
        hours = self.list_healthy_hours()
        seen_s = sum(hour.seen_s for hour in hours)
        if not hours or not self.hours:
            return None
        first, second, third = (
            compute_quantile(hour.gains[i] for hour in hours) or 0 for i in range(3)
        )
        return LearnedMemory(
            seen_s=min(int(seen_s), MAX_OBSERVED_S),
            gains=(first, second, third),
            start=max(self.starts, default=0),
            budget=self.budget if seen_s >= auto.learning_s else None,
        )

    def shift_times(self, step_s: float) -> None:
        """Shift all times by ``step_s`` seconds after the clock was set, by whole hours."""
        step_h = round(step_s / SECONDS_PER_HOUR)
        self.hours = [msgspec.structs.replace(hour, at=hour.at + step_h) for hour in self.hours]
        self.lows = [(at + step_h, low) for at, low in self.lows]
        self.budget_at, self.seen_at = self.budget_at + step_h, max(0.0, self.seen_at + step_s)

    def find_limit(self, budget: MemoryBudget) -> int | None:
        """Return the configured or else the newest known memory limit in bytes; None if unknown."""
        return budget.limit_bytes if budget.limit_bytes is not None else self.limit


def _is_same_revision(first: str, second: str) -> bool:
    # "MODEL VERSION"; the version is empty while the engine has not said it.
    return first == second or any(
        unknown.endswith(" ") and known.startswith(unknown)
        for unknown, known in ((first, second), (second, first))
    )


def find_lowest_growth(hourly_lows: Sequence[tuple[int, int]], first_hour: int) -> int:
    """Return the lowest growth in bytes since the hour with the number ``first_hour``."""
    return min(low for at, low in hourly_lows if at >= first_hour)


def select_healthy_hours(hours: Sequence[HourGrowth]) -> list[HourGrowth]:
    """Return the observed hours that are more than a day away from any incident."""
    struck = [hour.at for hour in hours if hour.incident]
    return [
        hour for hour in hours
        if hour.seen_s > 0 and all(abs(hour.at - other) >= HOURS_PER_DAY for other in struck)
    ]  # fmt: skip


def sum_healthy_s(hours: Sequence[HourGrowth]) -> float:
    """Return the observed seconds of all healthy hours."""
    return sum(hour.seen_s for hour in select_healthy_hours(hours))


def compute_quantile(growth_values: Iterable[int], quantile: float = GROWTH_QUANTILE) -> int | None:
    """Return a quantile of ``growth_values`` by nearest rank; None without values."""
    ordered = sorted(growth_values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] if ordered else None


def list_growth_within(hours: Iterable[HourGrowth], window_s: float) -> list[int]:
    """Return the growth in bytes for each hour, within the shortest window that is long enough.

    For several days, it is the growth of one day times the number of days.
    """
    window_h = window_s / SECONDS_PER_HOUR
    index = next(
        (i for i, learned_window_h in enumerate(LEARNED_WINDOWS_H) if window_h <= learned_window_h),
        len(LEARNED_WINDOWS_H) - 1,
    )
    days = max(1, math.ceil(window_h / LEARNED_WINDOWS_H[-1]))
    return [hour.gains[index] * days for hour in hours]


def propose_budget(learned: LearnedHistory, budget: MemoryBudget) -> int | None:
    """Return the budget in bytes for the learned growth; None if no growth was learned yet."""
    quantile = compute_quantile(list_growth_within(learned.list_healthy_hours(), budget.window_s))
    if quantile is None:
        return None
    start = max(learned.starts, default=learned.inherited.start if learned.inherited else 0)
    return clamp_budget(int(BUDGET_FACTOR * quantile), learned.find_limit(budget), start)


def clamp_budget(proposed_bytes: int, memory_limit: int | None, start_bytes: int) -> int:
    """Return the proposed budget within its minimum and maximum, in bytes.

    ``memory_limit`` is None if unknown. ``start_bytes`` is the size after a start.
    """
    if memory_limit is None:
        return max(proposed_bytes, MIN_BUDGET_BYTES)
    max_bytes = max(1, int(MAX_SHARE_OF_HEADROOM * max(0, memory_limit - start_bytes)))
    return min(max(proposed_bytes, int(MIN_SHARE_OF_LIMIT * memory_limit), 1), max_bytes)


class BudgetsInForce(NamedTuple):
    """Leak budgets in force. Incidents of the kinds in ``learning`` are only reported."""

    memory: MemoryPolicy
    learning: frozenset[IncidentKind] = frozenset()


class LearnedBudgets(msgspec.Struct, omit_defaults=True):
    """Learned growth and budgets of a replica's host and device memory, a row of the journal."""

    host: LearnedHistory = msgspec.field(default_factory=LearnedHistory)
    device: LearnedHistory = msgspec.field(default_factory=LearnedHistory)

    def observe(
        self,
        now: float,
        epoch: str,
        revision: str,
        assessment: Assessment,
        kinds_with_incident: Collection[IncidentKind],
    ) -> None:
        """Add an assessment at ``now``, in Unix seconds.

        ``kinds_with_incident`` holds the kinds with an incident that is open or in its cooldown.
        """
        self.host.observe(
            now, epoch, revision, assessment.host, GROWTH_KINDS["host"] in kinds_with_incident
        )
        self.device.observe(
            now, epoch, revision, assessment.device, GROWTH_KINDS["device"] in kinds_with_incident
        )

    def shift_times(self, step_s: float) -> None:
        """Shift all times by ``step_s`` seconds after the clock was set forward or back."""
        self.host.shift_times(step_s)
        self.device.shift_times(step_s)

    def list_memory_needs(self, ledger: Sequence[LedgerEntry]) -> dict[str, MemoryNeeds]:
        """Return the known memory needs of "host" and "device"."""
        return {
            name: make_memory_needs(name, size, history.limit, ledger)
            for name, history in (("host", self.host), ("device", self.device))
            if (size := history.find_largest_size()) is not None
        }

    def is_missing_budget(self, memory: MemoryPolicy) -> bool:
        """Report whether at least one ``Auto`` budget has not been learned yet."""
        pairs = ((self.host, memory.host), (self.device, memory.device))
        return any(b is not None and b.auto and history.budget is None for history, b in pairs)

    def inherit(self, inherited: LearnedWorkload | None) -> None:
        """Use what other replicas have learned; None if nothing is known."""
        if inherited is not None:
            self.host.inherit(inherited.host)
            self.device.inherit(inherited.device)

    def make_reports(self, auto: AutoBudgets) -> dict[str, LearnedMemory]:
        """Return what other replicas may inherit, for "host" and "device"."""
        reports = {"host": self.host.make_report(auto), "device": self.device.make_report(auto)}
        return {name: report for name, report in reports.items() if report is not None}

    def update_budgets(self, now: float, memory: MemoryPolicy) -> bool:
        """Update the ``Auto`` budgets, and report whether any may have changed."""
        changed = [
            learned.update_budget(now, budget, memory.auto)
            for learned, budget in ((self.host, memory.host), (self.device, memory.device))
            if budget is not None and budget.auto
        ]
        return any(changed)

    def update_and_resolve_budgets(
        self, now: float, memory: MemoryPolicy, previous: BudgetsInForce
    ) -> BudgetsInForce | None:
        """Update the ``Auto`` budgets. Return the budgets in force; None if they did not change."""
        self.update_budgets(now, memory)
        budgets = self.resolve_budgets(memory)
        same = budgets.learning == previous.learning and not has_budget_changed(
            previous.memory, budgets.memory
        )
        return None if same else budgets

    def resolve_budgets(self, memory: MemoryPolicy) -> BudgetsInForce:
        """Return the budgets in force, with a size for each ``Auto`` budget."""
        learning: set[IncidentKind] = set()

        def resolve(
            name: str, budget: MemoryBudget | None, learned: LearnedHistory
        ) -> MemoryBudget | None:
            if budget is None or not budget.auto:
                return budget
            limit = learned.find_limit(budget)
            if not learned.is_learned(memory.auto):
                learning.add(GROWTH_KINDS[name])
            size = compute_provisional_budget(limit) if learned.budget is None else learned.budget
            size = max(size, budget.minimum_bytes or 1)
            return msgspec.structs.replace(budget, growth_bytes=size)

        host = resolve("host", memory.host, self.host)
        device = resolve("device", memory.device, self.device)
        return BudgetsInForce(
            msgspec.structs.replace(memory, host=host, device=device), frozenset(learning)
        )


def has_budget_changed(old: MemoryPolicy, new: MemoryPolicy) -> bool:
    """Report whether a budget has changed by more than :data:`MIN_RELATIVE_CHANGE`."""
    pairs = ((old.host, new.host), (old.device, new.device))
    return any(
        a is not None and b is not None
        and abs(a.growth_bytes - b.growth_bytes) > MIN_RELATIVE_CHANGE * a.growth_bytes
        for a, b in pairs
    )  # fmt: skip
