"""Parse the metrics of supervisors, and find pods that are near their limit, blind or drained.

Metrics pages are untrusted: a value that no supervisor would write counts as unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll_api.assessment import Segment
from plimsoll_api.growth import (
    MAX_BASELINE_AGE_S,
    MAX_BASELINE_REQUESTS,
    MAX_REPORTED_BYTES,
    ReportedGrowth,
)
from plimsoll_api.learned import LEARNED_WINDOWS_H, MAX_OBSERVED_S, LearnedMemory
from plimsoll_api.memory_contract import MemoryNeeds
from plimsoll_api.memory_policy import NEAR_LIMIT_RATIO
from plimsoll_api.names import UNREADY_MANUAL
from plimsoll_api.state import SignalReason

PERCENT_STEP = 5
"""Step of the percentages in a status, so that not every sample changes the status."""

MAX_CONSUMED_RATIO = 1e9
"""Maximum consumed share of a budget, whose percentage fits into the status."""

MAX_RESTARTS = 1000
"""Maximum of ``restartBudget.count`` in the schema."""


SIGNAL_MISSING_S = 120.0
"""Seconds after which a signal without values counts as missing, as in the alert
PlimsollSupervisorBlind."""
NEAR_LIMIT_EXIT_RATIO = NEAR_LIMIT_RATIO - 0.03
"""Share of the memory limit below which memory is no longer near the limit. It is lower than
:data:`NEAR_LIMIT_RATIO`, so that the status does not flap."""
ENGINE_SIGNAL = "engine"
SIGNALS = (ENGINE_SIGNAL, "host", "metrics", "device", "shared_memory")
"""Signals that a supervisor needs to observe its engine, most important first."""
SIGNAL_REASONS = frozenset(SignalReason)
UNKNOWN_SIGNAL_REASON = "SignalMissing"
"""Reason for a missing signal if the supervisor reports no reason."""
MAX_LEAK_BYTES_PER_S = float(1 << 40)
MAX_SECONDS_TO_LIMIT = 3.2e9
"""Maximum forecast: a century."""
SEGMENT_NAMES = frozenset(segment.value for segment in Segment)


@dataclass(frozen=True)
class SlowLeak:
    """Slow leak of a replica; ``limit_s`` is the time until its memory limit, if known."""

    kind: str
    segment: str
    bytes_per_s: float
    limit_s: float | None = None


@dataclass(frozen=True)
class SupervisorMetrics:
    """Values from a supervisor's metrics; None if unknown.

    Attributes:
        host, device: The consumed shares of the leak budgets.
        restarts_left: The restarts that the restart budget still allows.
        slow_leaks: The slow leaks; None until the supervisor has evaluated host or device memory.
        host_growth, device_growth: The growth; None until all parts of it are known.
        drained: Whether a person took the replica out of service.
        missing_signals: The signals that have been missing for :data:`SIGNAL_MISSING_S`, each with
            the reason; None if the supervisor does not report signals.
        limit: The used share of the memory limit, without reclaimable memory.
        host_learned, device_learned: The learned values; None until all of them except the budget
            are known.
        host_needs, device_needs: The memory needs; None until all of them except the limit are
            known.

    """

    host: float | None = None
    device: float | None = None
    restarts_left: int | None = None
    slow_leaks: tuple[SlowLeak, ...] | None = None
    host_growth: ReportedGrowth | None = None
    device_growth: ReportedGrowth | None = None
    drained: bool | None = None
    missing_signals: tuple[tuple[str, str], ...] | None = None
    limit: float | None = None
    host_learned: LearnedMemory | None = None
    device_learned: LearnedMemory | None = None
    host_needs: MemoryNeeds | None = None
    device_needs: MemoryNeeds | None = None

    @property
    def is_blind(self) -> bool:
        """Whether the supervisor reports that it cannot observe its engine."""
        return any(signal == ENGINE_SIGNAL for signal, _ in self.missing_signals or ())


UNKNOWN_METRICS = SupervisorMetrics()
"""Metrics of a supervisor that was not scraped."""

_SAMPLE_PATTERN = re.compile(
    rb"^(plimsoll_memory_budget_consumed_ratio|plimsoll_restart_budget_remaining"
    rb"|plimsoll_supervisor_out_of_service|plimsoll_signal_age_seconds"
    rb"|plimsoll_supervisor_signal_missing|plimsoll_cgroup_memory_limit_ratio"
    rb"|plimsoll_memory_slow_leak(?:_bytes_per_second|_limit_seconds)?"
    rb"|plimsoll_memory_(?:needed|declared|declared_unfilled|limit)_bytes"
    rb"|plimsoll_memory_learned_(?:seconds|growth_bytes|start_bytes|budget_bytes)"
    rb"|plimsoll_memory_unexplained_bytes|plimsoll_memory_baseline_(?:age_seconds|requests))"
    rb"(?:\{([^{}\n]{0,512})\})?[ \t]{1,8}([-+.0-9A-Za-z]{1,32})[ \t\r]{0,8}$",
    re.MULTILINE,
)
"""Pattern for a sample. Every part is bounded, so that the matching time is linear."""

_LEAK_METRIC = b"plimsoll_memory_slow_leak"
_LEAK_RATE_METRIC = b"plimsoll_memory_slow_leak_bytes_per_second"
_LEAK_LIMIT_METRIC = b"plimsoll_memory_slow_leak_limit_seconds"
_SLOW_LEAK_METRICS = {
    _LEAK_METRIC: 1.0,
    _LEAK_RATE_METRIC: MAX_LEAK_BYTES_PER_S,
    _LEAK_LIMIT_METRIC: MAX_SECONDS_TO_LIMIT,
}
"""Metrics of slow leaks, each with its maximum value."""

_GROWTH_METRICS = {
    b"plimsoll_memory_unexplained_bytes": MAX_REPORTED_BYTES,
    b"plimsoll_memory_baseline_age_seconds": MAX_BASELINE_AGE_S,
    b"plimsoll_memory_baseline_requests": MAX_BASELINE_REQUESTS,
}
"""Metrics of growth in the order of the fields of :class:`ReportedGrowth`, each with its maximum
value."""

_LEARNED_METRICS = {
    b"plimsoll_memory_learned_seconds": MAX_OBSERVED_S,
    b"plimsoll_memory_learned_growth_bytes": MAX_REPORTED_BYTES,
    b"plimsoll_memory_learned_start_bytes": MAX_REPORTED_BYTES,
    b"plimsoll_memory_learned_budget_bytes": MAX_REPORTED_BYTES,
}
"""Metrics of the values that a replica has learned, each with its maximum value."""

_NEEDS_METRICS = {
    b"plimsoll_memory_needed_bytes": MAX_REPORTED_BYTES,
    b"plimsoll_memory_declared_bytes": MAX_REPORTED_BYTES,
    b"plimsoll_memory_declared_unfilled_bytes": MAX_REPORTED_BYTES,
    b"plimsoll_memory_limit_bytes": MAX_REPORTED_BYTES,
}
"""Metrics of the memory needs in the order of :class:`MemoryNeeds`, each with its maximum value."""

_WINDOW_LABEL_PATTERN = re.compile(rb'(?:^|,)\s{0,8}window="([0-9]{1,4})h"')

_SEGMENT_LABEL_PATTERN = re.compile(rb'(?:^|,)\s{0,8}segment="([a-z_]{1,63})"')

_MANUAL_LABEL_PATTERN = re.compile(rb'(?:^|,)\s{0,8}reason="%b"' % UNREADY_MANUAL.encode())

_SIGNAL_LABEL_PATTERN = re.compile(rb'(?:^|,)\s{0,8}signal="([a-z_]{1,32})"')

_REASON_LABEL_PATTERN = re.compile(rb'(?:^|,)\s{0,8}reason="([A-Za-z]{1,64})"')

_KIND_LABEL_PATTERN = re.compile(rb'(?:^|,)\s{0,8}kind="(host|device)"')


def parse_metrics_page(page: bytes) -> SupervisorMetrics:
    """Parse the values from a page in the Prometheus text format.

    A missing, malformed or out-of-range value is unknown. Never raises.
    """
    ratios: dict[bytes, float | None] = {}
    slow: dict[bytes, dict[bytes, tuple[float | None, str]]] = {}
    grown: dict[bytes, dict[bytes, float | None]] = {}
    needs: dict[bytes, dict[bytes, float | None]] = {}
    lessons: dict[bytes, dict[tuple[bytes, int], float | None]] = {}
    restarts: float | None = None
    manual: float | None = None
    limit: float | None = None
    ages: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, labels, text in _SAMPLE_PATTERN.findall(page):
        if name == b"plimsoll_restart_budget_remaining":
            restarts = _parse_number(text, MAX_RESTARTS)
        elif name == b"plimsoll_supervisor_out_of_service":
            manual = _parse_number(text, 1.0) if _MANUAL_LABEL_PATTERN.search(labels) else manual
        elif name == b"plimsoll_cgroup_memory_limit_ratio":
            limit = _parse_number(text, MAX_CONSUMED_RATIO)
        elif name == b"plimsoll_signal_age_seconds":
            if signal := _SIGNAL_LABEL_PATTERN.search(labels):
                ages[signal[1].decode()] = _parse_number(text, MAX_SECONDS_TO_LIMIT)
        elif name == b"plimsoll_supervisor_signal_missing":
            if (signal := _SIGNAL_LABEL_PATTERN.search(labels)) and (
                reason := _REASON_LABEL_PATTERN.search(labels)
            ):
                reasons[signal[1].decode()] = reason[1].decode()
        elif not (kind := _KIND_LABEL_PATTERN.search(labels)):
            continue
        elif name in _GROWTH_METRICS:
            grown.setdefault(kind[1], {})[name] = _parse_number(text, _GROWTH_METRICS[name])
        elif name in _NEEDS_METRICS:
            needs.setdefault(kind[1], {})[name] = _parse_number(text, _NEEDS_METRICS[name])
        elif name in _LEARNED_METRICS:
            window = _WINDOW_LABEL_PATTERN.search(labels)
            key = name, int(window[1]) if window else 0
            lessons.setdefault(kind[1], {})[key] = _parse_number(text, _LEARNED_METRICS[name])
        elif name in _SLOW_LEAK_METRICS:
            found = _SEGMENT_LABEL_PATTERN.search(labels)
            segment = found[1].decode() if found else ""
            slow.setdefault(name, {})[kind[1]] = (
                _parse_number(text, _SLOW_LEAK_METRICS[name]),
                segment,
            )
        else:
            ratios[kind[1]] = _parse_number(text, MAX_CONSUMED_RATIO)
    restarts_left = int(restarts) if restarts is not None and restarts.is_integer() else None
    return SupervisorMetrics(
        host=ratios.get(b"host"),
        device=ratios.get(b"device"),
        restarts_left=restarts_left,
        slow_leaks=_make_slow_leaks(slow),
        host_growth=_make_reported_growth(grown.get(b"host", {})),
        device_growth=_make_reported_growth(grown.get(b"device", {})),
        drained=None if manual is None else bool(manual),
        missing_signals=_find_missing_signals(ages, reasons),
        limit=limit,
        host_learned=_make_learned_memory(lessons.get(b"host", {})),
        device_learned=_make_learned_memory(lessons.get(b"device", {})),
        host_needs=_make_memory_needs(needs.get(b"host", {})),
        device_needs=_make_memory_needs(needs.get(b"device", {})),
    )


def _find_missing_signals(
    ages: Mapping[str, float | None], reasons: Mapping[str, str]
) -> tuple[tuple[str, str], ...] | None:
    """Return each signal missing for :data:`SIGNAL_MISSING_S`, with the reason.

    None if no age of a signal is known.
    """
    known = {signal: ages.get(signal) for signal in SIGNALS}
    if not any(age is not None for age in known.values()):
        return None
    lost = [signal for signal, age in known.items() if age is not None and age > SIGNAL_MISSING_S]
    known_reasons = {
        signal: reason for signal, reason in reasons.items() if reason in SIGNAL_REASONS
    }
    return tuple((signal, known_reasons.get(signal, UNKNOWN_SIGNAL_REASON)) for signal in lost)


def _make_reported_growth(values: Mapping[bytes, float | None]) -> ReportedGrowth | None:
    known = [int(value) for name in _GROWTH_METRICS if (value := values.get(name)) is not None]
    return ReportedGrowth(*known) if len(known) == len(_GROWTH_METRICS) else None


# ``values`` are keyed by metric name and window in hours, 0 for metrics without a window.
def _make_learned_memory(values: Mapping[tuple[bytes, int], float | None]) -> LearnedMemory | None:
    observed, growth, start, budget = _LEARNED_METRICS
    needed = [(observed, 0), *((growth, hours) for hours in LEARNED_WINDOWS_H), (start, 0)]
    known = [int(value) for one in needed if (value := values.get(one)) is not None]
    if len(known) < len(needed):
        return None
    seen_s, first, second, third, least = known
    size = int(values.get((budget, 0)) or 0) or None
    return LearnedMemory(seen_s, (first, second, third), least, size)


def _make_memory_needs(values: Mapping[bytes, float | None]) -> MemoryNeeds | None:
    level, pools, unfilled, limit = (values.get(name) for name in _NEEDS_METRICS)
    if level is None or pools is None or unfilled is None:
        return None
    return MemoryNeeds(int(level), int(pools), int(unfilled), int(limit) if limit else None)


def _make_slow_leaks(
    values: Mapping[bytes, Mapping[bytes, tuple[float | None, str]]],
) -> tuple[SlowLeak, ...] | None:
    """Return the slow leaks in a metrics page; None if the supervisor has not evaluated any yet."""
    evaluated = {
        kind: value
        for kind, (value, _) in values.get(_LEAK_METRIC, {}).items()
        if value is not None
    }
    if not evaluated:
        return None
    leaks = []
    for kind in sorted(evaluated):
        rate, segment = values.get(_LEAK_RATE_METRIC, {}).get(kind, (None, ""))
        limit_s, _ = values.get(_LEAK_LIMIT_METRIC, {}).get(kind, (None, ""))
        if evaluated[kind] and rate is not None:
            known = segment if segment in SEGMENT_NAMES else ""
            leaks.append(SlowLeak(kind.decode(), known, rate, limit_s))
    return tuple(leaks)


# None for any other text, such as NaN.
def _parse_number(text: bytes, maximum: float) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= maximum else None


def compute_rounded_percent(ratio: float) -> int:
    """Convert a ratio to percent, rounded down to a multiple of :data:`PERCENT_STEP`."""
    return int(ratio * 100 / PERCENT_STEP + 1e-9) * PERCENT_STEP


def count_drained(metrics: Mapping[str, SupervisorMetrics]) -> int | None:
    """Return the number of replicas that a person took out of service; None if it is unknown."""
    known = [values.drained for values in metrics.values() if values.drained is not None]
    return sum(known) if known else None


def list_drained_pods(metrics: Mapping[str, SupervisorMetrics]) -> list[str]:
    """Return the names of the replicas that a person took out of service, sorted."""
    return sorted(pod for pod, one in metrics.items() if one.drained)


def find_blind_pods(metrics: Mapping[str, SupervisorMetrics]) -> dict[str, str]:
    """Return the pods whose supervisors cannot observe their engines, each with the reason."""
    return {
        pod: one.missing_signals[0][1]
        for pod, one in sorted(metrics.items())
        if one.missing_signals and one.is_blind
    }


def find_pods_missing_signals(
    metrics: Mapping[str, SupervisorMetrics],
) -> list[tuple[str, list[str]]]:
    """Return the pods that lack signals, with the reasons; the most important signal is first."""
    lost = [
        (pod, one.missing_signals) for pod, one in sorted(metrics.items()) if one.missing_signals
    ]
    lost.sort(key=lambda one: SIGNALS.index(one[1][0][0]))
    return [(pod, [reason for _, reason in unseen]) for pod, unseen in lost]


def list_pods_near_limit(
    metrics: Mapping[str, SupervisorMetrics], was_near_limit: bool
) -> list[str]:
    """Return the names of the replicas near their memory limit, sorted.

    A lower limit applies if ``was_near_limit``.
    """
    threshold = NEAR_LIMIT_EXIT_RATIO if was_near_limit else NEAR_LIMIT_RATIO
    return sorted(
        pod for pod, one in metrics.items() if one.limit is not None and one.limit > threshold
    )


def make_memory_status(metrics: Mapping[str, SupervisorMetrics]) -> dict[str, object]:
    """Return ``status.memory``: the highest consumed percentages and their replica, or nothing."""
    status: dict[str, object] = {}
    worst: tuple[float, str] | None = None
    for kind, field in (("host", "hostConsumedPercent"), ("device", "deviceConsumedPercent")):
        known = [
            (value, pod)
            for pod, one in sorted(metrics.items())
            if (value := getattr(one, kind)) is not None
        ]
        if known:
            highest = max(known)
            status[field] = compute_rounded_percent(highest[0])
            worst = max(worst, highest) if worst else highest
    if worst:
        status["replica"] = worst[1]
    return status
