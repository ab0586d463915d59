"""Read the load of an external engine from its metrics page and its frontend.

If the engine core hangs while idle, its gauges stay at zero when requests arrive. Requests are
therefore also counted at the frontend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from plimsoll_api.admin import Load
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.state import Signal, SignalReason
from plimsoll_sidecar.act.adapters.external_profile import EngineProfile
from plimsoll_sidecar.act.adapters.optional_paths import (
    HTTP_NOT_FOUND,
    OptionalReader,
    parse_pause,
    parse_transfers,
)
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.metrics_page import (
    MALFORMED_LABELS,
    MAX_METRIC_LINES,
    PROCESS_START_METRIC,
    Labels,
    MetricKind,
    MetricsPage,
    PoolRatio,
    Series,
    make_page_reader,
)

SCRAPE_INTERVAL_S = 2.0
# The interval is shorter while requests in flight make no progress.
STALLED_SCRAPE_INTERVAL_S = 1.0
REQUEST_TIMEOUT_S = 2.0
HTTP_UNAUTHORIZED = (401, 403)
# Number of consecutive consistent pages that end an inconsistency. If two servers share a port and
# one answers 90 % of all requests, all these pages come from it with a probability of 2e-14.
MIN_CONSISTENT_PAGES = 300
UNREAD_PAGE_SIGNAL = Signal(True)
INCONSISTENT_PAGES_SIGNAL = Signal(
    False,
    SignalReason.METRICS_INCONSISTENT,
    "the metrics pages contradict each other, because several servers with separate counters "
    "answer on one port: run one metrics registry per port; until then, memory is supervised "
    "without the load",
)


class ExternalLoad:
    """Scrapes the metrics page of an engine, and keeps the load of the most recent scrape.

    Args:
        server: The client of the engine's server.
        profile: The paths and metrics of the engine type.
        clock: Returns a monotonic time in seconds.
        count_waiting: Returns the number of connections that wait for an answer; None if unknown.
        are_helpers_replaced: Returns whether all helper processes have been replaced since the
            previous page.

    Attributes:
        restarts: The number of restarts of all helper processes without the main process.
        signal: Whether the newest page is usable.

    """

    def __init__(
        self,
        server: HttpClient,
        profile: EngineProfile,
        clock: Callable[[], float] = time.monotonic,
        count_waiting: Callable[[], int | None] = lambda: None,
        are_helpers_replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server, self._profile, self._clock = server, profile, clock
        self._count_waiting = count_waiting
        self._are_helpers_replaced = are_helpers_replaced
        self._read = make_page_reader(profile.iterate_series())
        self._registry = RegistryCheck(profile)
        self._aborts = AbortCounter(profile)
        self._pause = OptionalReader(server, profile.paused_path, parse_pause, clock)
        self._transfers = OptionalReader(server, profile.transfers_path, parse_transfers, clock)
        self._next_at = 0.0
        self._scraped_at: float | None = None
        self._load: Load | None = None
        self._last_progress: tuple[int | None, ...] | None = None
        self._entered_at_progress = self._inflight_at_progress = 0
        self.restarts = 0
        self.signal = UNREAD_PAGE_SIGNAL

    def get_newest_load(self) -> tuple[Load, float] | None:
        """Return the newest load and its age in seconds; None if the last scrape failed."""
        now = self._clock()
        if self._profile.metrics and now >= self._next_at:
            self._next_at = now + SCRAPE_INTERVAL_S
            self._scrape(now)
        if self._load is None or self._scraped_at is None:
            return None
        return self._load, now - self._scraped_at

    def reset(self) -> None:
        """Discard all data of the previous process."""
        self._load, self._scraped_at, self._next_at = None, None, 0.0
        self._last_progress, self.restarts = None, 0
        self._entered_at_progress = self._inflight_at_progress = 0
        self._registry, self._aborts = RegistryCheck(self._profile), AbortCounter(self._profile)
        self._pause.reset()
        self._transfers.reset()
        self.signal = UNREAD_PAGE_SIGNAL

    def request_scrape(self) -> None:
        """Request a scrape in the next call of :meth:`get_newest_load`."""
        self._next_at = 0.0

    def _scrape(self, now: float) -> None:
        self._load = self._scraped_at = None
        try:
            status, body = self._server.call("GET", "/metrics", REQUEST_TIMEOUT_S)
        except EngineError as error:
            self.signal = Signal(False, SignalReason.METRICS_SILENT, str(error))
            return
        if status != 200:
            self.signal = _make_http_status_signal(status)
            return
        page = self._read(body)
        if not self._registry.is_consistent(page) and self._are_helpers_replaced():
            self.restarts += 1
            self._registry, self._aborts = RegistryCheck(self._profile), AbortCounter(self._profile)
            self._registry.is_consistent(page)
        if self._registry.is_inconsistent:
            self.signal, self._last_progress = INCONSISTENT_PAGES_SIGNAL, None
            return
        self._registry.set_counters(page)
        self._load, self._scraped_at = read_load(page, self._profile), now
        self.signal = _make_page_signal(page, self._profile)
        if self._load is not None:
            self._load.aborted_total = self._aborts.count_aborts(self._load, page)
            self._set_inflight(self._load, page, now)

    def _set_inflight(self, load: Load, page: MetricsPage, now: float) -> None:
        # Requests that reached the frontend since the engine's last progress are added to the
        # engine's number. Earlier ones are not: a server that forgets to subtract a request would
        # seem busy forever. The engine may accept a request before its next progress, so the larger
        # number is used.
        engine_inflight = (load.running or 0) + (load.waiting or 0)
        progress = (load.steps_total, load.prompt_tokens_total, load.generation_tokens_total)
        entered = self._read_frontend_inflight(page)
        if entered is not None:
            if progress != self._last_progress:
                self._entered_at_progress, self._inflight_at_progress = entered, engine_inflight
            self._entered_at_progress = min(self._entered_at_progress, entered)
            engine_inflight = max(
                engine_inflight,
                min(entered, self._inflight_at_progress + entered - self._entered_at_progress),
            )
        load.inflight = max(engine_inflight, self._count_waiting() or 0)
        if progress == self._last_progress and load.inflight:
            self._next_at = now + STALLED_SCRAPE_INTERVAL_S
            load.paused = self._pause.read()
            transfers = self._transfers.read()
            load.deferred = load.deferred if transfers is None else transfers
        self._last_progress = progress

    def _read_frontend_inflight(self, page: MetricsPage) -> int | None:
        profile = self._profile
        if profile.inflight is not None:
            entered = page.compute_value(profile.inflight)
            excluded = (
                page.compute_value(profile.inflight_excluded)
                if profile.inflight_excluded is not None
                else None
            )
            return None if entered is None else max(0, int(entered - (excluded or 0.0)))
        if profile.load_path is None:
            return None
        try:
            status, body = self._server.call("GET", profile.load_path, REQUEST_TIMEOUT_S)
            answered = decode(body, _ServerLoad).server_load
        except (EngineError, MalformedError):
            return None
        return max(0, answered) if status == 200 else None


class RegistryCheck:
    """Checks that all metrics pages of one process come from the same metrics registry.

    Several servers can share a port, and any of them may answer a request. A page then covers only
    one of them.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self._all_series = tuple(dict.fromkeys(profile.iterate_series()))
        self._counters: dict[tuple[str, Labels], float] = {}
        self._start_times: dict[tuple[str, Labels], float] = {}
        self._earlier_counters: dict[tuple[str, Labels], float] = {}
        self._contradictions, self._consistent_in_row = 0, 0

    def is_consistent(self, page: MetricsPage) -> bool:
        """Add a page, and report whether it is consistent with the previous pages.

        A page is inconsistent if a counter has decreased or has another start time.
        """
        start_times = page.read_start_times(self._all_series)
        if self._has_new_counters(start_times):
            self._earlier_counters, self._start_times = dict(self._counters), {}
        counters = {
            key: value + self._earlier_counters.get(key, 0.0)
            for key, value in page.read_counters(self._all_series).items()
        }
        fell = any(value < self._counters.get(key, value) for key, value in counters.items())
        other = any(
            value != self._start_times.get(key, value) for key, value in start_times.items()
        )
        if max(len(self._counters), len(self._start_times)) > MAX_METRIC_LINES or fell or other:
            self._counters, self._start_times, self._earlier_counters = {}, {}, {}
        # If a rank is absent, the value of an unreadable line stays unknown.
        broken = {name for name, labels in counters if labels == MALFORMED_LABELS}
        self._counters |= {key: math.nan for key in self._counters if key[0] in broken}
        self._counters |= {
            key: value for key, value in counters.items() if key[1] != MALFORMED_LABELS
        }
        self._start_times |= start_times
        self._contradictions += fell or other
        self._consistent_in_row = 0 if fell or other else self._consistent_in_row + 1
        return not (fell or other)

    @property
    def is_inconsistent(self) -> bool:
        """Whether recent pages contradict each other."""
        return self._contradictions > 1 or (
            self._contradictions == 1 and self._consistent_in_row < MIN_CONSISTENT_PAGES
        )

    def set_counters(self, page: MetricsPage) -> None:
        """Set the counters of ``page`` to their totals, also those of absent ranks."""
        page.set_counters(self._counters)

    def _has_new_counters(self, start_times: dict[tuple[str, Labels], float]) -> bool:
        # vLLM creates its counters again when elastic expert parallelism adds ranks.
        before = self._start_times
        process = {key for key in before if key[0] == PROCESS_START_METRIC}
        counters = (before.keys() & start_times.keys()) - process
        return (
            bool(process and counters)
            and all(start_times.get(key) == before[key] for key in process)
            and all(start_times[key] > before[key] for key in counters)
        )


class _ServerLoad(msgspec.Struct):
    # vLLM's answer to /load. The value is zero unless vLLM was started with
    # --enable-server-load-tracking.
    server_load: int


def read_load(page: MetricsPage, profile: EngineProfile) -> Load | None:
    """Return the load from the page; None without the number of running requests."""
    known_values = {
        figure: value
        for figure, series in profile.metrics.items()
        if (value := page.compute_value(series)) is not None
    }
    if "running" not in known_values:
        return None
    usage = known_values.pop("kv_usage_ratio", None)
    counts: dict[str, Any] = {name: int(value) for name, value in known_values.items()}
    load = Load(**counts)
    if isinstance(usage, PoolRatio):
        load.kv_usage_ratio = float(usage)
        load.kv_usage_least_ratio = usage.least if usage.least < usage else None
    deferred = (
        page.compute_value(profile.deferred_requests)
        if profile.deferred_requests is not None
        else None
    )
    load.deferred = None if deferred is None else int(deferred)
    load.steps_total = next(
        (
            steps
            for step_series in profile.steps
            if (steps := _sum_series(page, step_series)) is not None
        ),
        None,
    )
    if profile.steps_are_progress and load.steps_total is None:
        load.prompt_tokens_total = load.generation_tokens_total = None
    return load


def _sum_series(page: MetricsPage, series_list: Iterable[Series]) -> int | None:
    values = [page.compute_value(series) for series in series_list]
    known_values = [value for value in values if value is not None]
    return int(sum(known_values)) if len(known_values) == len(values) else None


def _make_http_status_signal(status: int) -> Signal:
    if status in HTTP_UNAUTHORIZED:
        return Signal(
            False,
            SignalReason.METRICS_UNAUTHORIZED,
            f"GET /metrics returned HTTP {status}, because the page needs an API key, which "
            "the supervisor does not have: serve the page without an API key",
        )
    if status == HTTP_NOT_FOUND:
        why = (
            "GET /metrics returned HTTP 404: start the engine with its metrics enabled (SGLang: "
            "--enable-metrics)"
        )
        return Signal(False, SignalReason.METRICS_MISSING, why)
    return Signal(False, SignalReason.METRICS_SILENT, f"GET /metrics returned HTTP {status}")


def _make_page_signal(page: MetricsPage, profile: EngineProfile) -> Signal:
    gauges = [gauge for gauge in profile.metrics.values() if gauge.kind is not MetricKind.COUNTER]
    absent = [gauge.name for gauge in gauges if not page.has_series(gauge)]
    if len(absent) == len(gauges):
        why = (
            f"the metrics page has none of the metrics {', '.join(absent)}: check the port, "
            "because another program may serve it"
        )
        return Signal(False, SignalReason.METRICS_UNKNOWN_NAMES, why)
    if absent:
        why = f"the metrics page lacks the metrics {', '.join(absent)}"
        return Signal(False, SignalReason.METRICS_INCOMPLETE, why)
    unknown = [gauge.name for gauge in gauges if page.compute_value(gauge) is None]
    if unknown:
        why = f"the metrics page has invalid values for the metrics {', '.join(unknown)}"
        return Signal(False, SignalReason.METRICS_INCOMPLETE, why)
    return Signal(True)


class AbortCounter:
    """Counter of the aborted requests of one process, which never decreases."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self._certain_missing = 0.0
        self._previous_missing = math.inf

    def count_aborts(self, load: Load, page: MetricsPage) -> int | None:
        """Return the number of aborted requests up to ``page``; None if unknown."""
        counted, profile = load.aborted_total, self._profile
        if (
            counted is None
            and profile.aborts_since is not None
            and page.has_series(profile.aborts_since)
        ):
            counted = 0
        begun = (
            page.compute_value(profile.first_tokens) if profile.first_tokens is not None else None
        )
        finished = (
            page.compute_value(profile.finished_requests)
            if profile.finished_requests is not None
            else None
        )
        if begun is None or finished is None or load.running is None or load.waiting is None:
            return None if counted is None else int(counted + self._certain_missing)
        waiting = load.waiting
        if load.preemptions_total is not None:
            # Only preempted requests wait after their first token.
            waiting = min(waiting, load.preemptions_total)
        alive = load.running + waiting
        missing = max(0.0, begun - finished - alive)
        # The engine's processes update their metrics at slightly different times. Only a number
        # that two pages show is certain.
        certain = min(missing, self._previous_missing)
        self._certain_missing = max(self._certain_missing, certain)
        self._previous_missing = missing
        return int((counted or 0) + self._certain_missing)
