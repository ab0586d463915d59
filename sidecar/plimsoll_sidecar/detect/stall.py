"""Suspect stalls: requests wait, and the engine makes no progress.

A frontend has stalled if neither its status nor its serving port answers; a serving port that is
silent alone, once it has answered for a minute. A main process that ended while others still run is
also a stall. ``govern/phases.py`` confirms a stall that lasts.
"""

from __future__ import annotations

from plimsoll_api.assessment import Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.trace import Sample, SampleLoad
from plimsoll_sidecar.detect.demand import count_inflight
from plimsoll_sidecar.detect.patience import (
    LONG_PAUSE_S,
    PAUSE_MARGIN_S,
    Pause,
    PauseHistory,
    find_pause_limit,
)

FRONTEND_TIMEOUT_FACTOR = 2.0
"""Multiple of the timeout after which a frontend that does not answer has always stalled."""
MIN_ANSWERED_S, MIN_SILENCE_S = 60.0, 16.0
"""Minimum time for which a port must have answered, and minimum silence after it: requests time out
after 3 s, so five in a row have failed."""
MIN_MAIN_PROCESS_ABSENCE_S = 10.0
"""Time without a main process after which the others count as left behind; at a normal end, they
follow within 0.8 to 4 s for vLLM."""
MAX_OBSERVED_GAP_INTERVALS = 5.0
"""Longest gap between two samples that counts as observed, in sample intervals."""
MAX_UNANSWERED_GAP_S = 8.0
"""Gap between two samples that always counts as observed: that of a silent engine waits for two
ports."""
MAX_SAME_PAGE_DIFFERENCE_S = 0.01
"""Maximum difference between two times of the same page."""


class _Port:
    """Earlier silences of one port, and the length of the present silence."""

    def __init__(self) -> None:
        self.silent_s = self.longest_s = self.answered_s = 0.0

    def end_silence(self, elapsed_s: float) -> None:
        if self.silent_s > 0.0:
            self.longest_s = max(self.longest_s, self.silent_s + elapsed_s)
        self.answered_s += self.silent_s + elapsed_s
        self.silent_s = 0.0

    def find_limit(self, max_s: float) -> tuple[float, str]:
        """Return the longest usual silence in seconds, at most ``max_s``, and its description."""
        usual = max(MIN_SILENCE_S, self.longest_s + PAUSE_MARGIN_S)
        if self.answered_s < MIN_ANSWERED_S or usual >= max_s:
            return max_s, ""
        longest = f"the longest was {self.longest_s:.0f} s" if self.longest_s else "none before"
        return usual, f"; {longest}"


class StallWatch:
    """Watch of the progress of one epoch, between scrapes of the metrics page if there is one."""

    def __init__(self, timeout_s: float, interval_s: float) -> None:
        self.timeout_s = timeout_s
        self._longest_elapsed_s = max(MAX_OBSERVED_GAP_INTERVALS * interval_s, MAX_UNANSWERED_GAP_S)
        self._last_t: float | None = None
        self._page_t: float | None = None
        self._progress: tuple[int, ...] | None = None
        self._gaps = PauseHistory()
        self._frozen_s = self._unused_s = 0.0
        self._status, self._serving = _Port(), _Port()
        self._headless_s = self._unasked_s = 0.0
        self._asked_beside = self._is_alone = False
        self._throttled: int | None = None
        self._throttled_since = 0
        self._answered = self._idle = self._rested = False
        self._cpu_s: float | None = None
        self._cpu_spent: float | None = None

    def update(self, sample: Sample) -> Suspicion | None:
        """Add a sample, and return the suspicion of a stall; None if there is none."""
        elapsed_s = 0.0 if self._last_t is None else max(0.0, sample.t - self._last_t)
        elapsed_s = min(elapsed_s, self._longest_elapsed_s)
        self._last_t = sample.t
        self._count_throttling(sample)
        self._record_serving(sample, elapsed_s)
        if not sample.scrape_ok:
            if sample.host.processes and sample.host.frontend_lives is False:
                self._headless_s += elapsed_s
            elif self._answered and sample.host.processes:
                self._status.silent_s += elapsed_s
            return self._find_stall()
        self._status.end_silence(elapsed_s)
        self._answered, self._headless_s = True, 0.0
        if sample.load_age_s is not None:
            page_t, before = sample.t - sample.load_age_s, self._page_t
            if before is not None and page_t - before < MAX_SAME_PAGE_DIFFERENCE_S:
                return self._find_stall()
            elapsed_s = 0.0 if before is None else min(page_t - before, self._longest_elapsed_s)
            self._page_t = page_t
        progress, inflight = _read_progress(sample.load), _count_requests_needing_step(sample.load)
        if progress is None or inflight is None:
            return self._find_stall()
        if sample.load.paused or self._rested:
            # The pause covers at least a part of the time since the last page.
            elapsed_s, self._cpu_s = 0.0, None
        self._rested = sample.load.paused is True
        self._update_pauses(sample, elapsed_s, progress, inflight)
        return self._find_stall()

    @property
    def is_in_long_step(self) -> bool:
        """Whether the present step takes unusually long; False if steps are not reported."""
        return self._frozen_s >= LONG_PAUSE_S

    # ---- one sample

    def _record_serving(self, sample: Sample, elapsed_s: float) -> None:
        """Record whether the serving port answered; some ask it only while the status is silent."""
        port = self._serving
        self._unasked_s += elapsed_s
        self._asked_beside = self._asked_beside or (sample.scrape_ok and sample.serving is not None)
        if sample.serving or (sample.scrape_ok and not self._asked_beside):
            port.end_silence(self._unasked_s)
        elif sample.scrape_ok and sample.ready is False:
            port.silent_s = 0.0  # it starts, or replaces its worker
        elif sample.serving is False and self._answered and sample.host.frontend_lives is not False:
            # A silence begins with the first request that gets no answer.
            port.silent_s += self._unasked_s if port.silent_s else elapsed_s
        else:
            return
        self._unasked_s = 0.0
        self._is_alone = sample.scrape_ok and port.silent_s > 0.0

    @property
    def _silent_s(self) -> float:
        return min(self._status.silent_s, self._serving.silent_s)

    def _count_throttling(self, sample: Sample) -> None:
        now, before = sample.host.cgroup_throttled, self._throttled
        if self._frozen_s <= 0.0 and self._silent_s <= 0.0:
            self._throttled_since = 0
        if now is not None:
            if before is not None and now > before:
                self._throttled_since += now - before
            self._throttled = now

    def _update_pauses(
        self, sample: Sample, elapsed_s: float, progress: tuple[int, ...], inflight: int
    ) -> None:
        self._unused_s = self._unused_s + elapsed_s if inflight == 0 else 0.0
        if inflight == 0:
            if self._progress is not None and progress != self._progress:
                # SGLang's gauge is from its last log line, and may be 0 while requests run.
                self._gaps.add_service(elapsed_s, progress[0] - self._progress[0])
            if progress != self._progress or not self._have_clients_given_up():
                self._start_pause(sample)
        elif progress == self._progress:
            # Requests may have arrived at any time since the engine was idle.
            self._frozen_s += 0.0 if self._idle else elapsed_s
            self._update_cpu_time(sample)
        else:
            if self._progress is not None:
                steps = progress[0] - self._progress[0]
                self._update_cpu_time(sample)
                lasted = Pause(self._frozen_s + elapsed_s, self._cpu_spent)
                self._gaps.add(self._frozen_s, steps, lasted.is_computing, elapsed_s)
            self._start_pause(sample)
        self._progress, self._idle = progress, inflight == 0

    def _have_clients_given_up(self) -> bool:
        """Report whether all clients gave up during a long pause, and may soon retry.

        The result is False once no request has come for as long as the pause.
        """
        return self._frozen_s >= LONG_PAUSE_S and self._unused_s < self._frozen_s

    def _start_pause(self, sample: Sample) -> None:
        self._frozen_s, self._cpu_s, self._cpu_spent = 0.0, sample.host.cpu_s, None

    def _update_cpu_time(self, sample: Sample) -> None:
        now, since = sample.host.cpu_s, self._cpu_s
        if now is None or since is None or now < since:
            self._cpu_spent = None
        else:
            self._cpu_spent = now - since

    # ---- suspicion

    def _find_stall(self) -> Suspicion | None:
        silence = Pause(self._frozen_s, self._cpu_spent)
        limit_s, why = find_pause_limit(silence, self._gaps, self.timeout_s)
        if self._frozen_s >= limit_s:
            reason = (
                f"requests are in flight, but no step completed for {self._frozen_s:.0f} s{why}"
            )
            return self._make_suspicion(self._frozen_s / limit_s, reason, "worker")
        if self._headless_s >= MIN_MAIN_PROCESS_ABSENCE_S:
            reason = (
                "the engine's main process ended, but its other processes still run and hold"
                f" memory for {self._headless_s:.0f} s"
            )
            return self._make_suspicion(
                self._headless_s / MIN_MAIN_PROCESS_ABSENCE_S, reason, "frontend"
            )
        return self._find_frontend_stall()

    def _find_frontend_stall(self) -> Suspicion | None:
        latest = self.timeout_s * FRONTEND_TIMEOUT_FACTOR
        least, port = min(MIN_SILENCE_S, latest), self._serving
        if self._is_alone and port.answered_s >= MIN_ANSWERED_S and self._status.silent_s <= 0.0:
            limit_s, why = port.find_limit(latest)
            if port.silent_s >= limit_s:
                reason = (
                    f"the serving port did not answer for {port.silent_s:.0f} s, although the"
                    f" status did{why}"
                )
                return self._make_suspicion(port.silent_s / limit_s, reason, "frontend")
        for port in (self._serving, self._status):
            limit_s, why = port.find_limit(latest)
            if port.silent_s >= limit_s and self._silent_s >= least:
                reason = (
                    "the engine's processes run, but neither its status nor its serving port"
                    f" answered for {self._silent_s:.0f} s{why}"
                )
                return self._make_suspicion(port.silent_s / limit_s, reason, "frontend")
        return None

    def _make_suspicion(self, ratio: float, reason: str, process: str) -> Suspicion:
        evidence = [reason]
        if self._throttled_since:
            evidence.append(
                "the kernel throttled the engine meanwhile: its memory exceeded memory.high "
                f"{self._throttled_since} times"
            )
        return Suspicion(
            kind=IncidentKind.STALL,
            segment=None,
            confidence=1.0,
            consumed_ratio=round(ratio, 3),
            over_budget=True,
            process=process,
            evidence=evidence,
        )


def _count_requests_needing_step(load: SampleLoad) -> int | None:
    """Return the number of requests in flight that need a step; None if unknown.

    Requests that wait for a grammar or for another engine's KV blocks do not count.
    """
    inflight = count_inflight(load)
    if inflight is None:
        return None
    return max(0, inflight - (load.compiling or 0) - (load.deferred or 0))


def _read_progress(load: SampleLoad) -> tuple[int, ...] | None:
    """Return the counters of completed work; None if unknown. Accepting requests is no progress."""
    if load.steps_total is not None:
        return (load.steps_total,)
    tokens = (load.generation_tokens_total, load.prompt_tokens_total)
    return tuple(value for value in tokens if value is not None) or None
