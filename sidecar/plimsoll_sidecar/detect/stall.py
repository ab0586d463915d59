"""Work that waits while nothing moves.

A pause is a stall when it is longer, by a margin, than any that this service's own history holds,
where that history covers the present demand; and at the latest after the configured timeout. Idle
is no stall. What is unknown (a failed scrape, a worker that starts) stops the clock rather than
counts as a stall. A frontend whose processes live has stalled itself when for twice the timeout
neither its status nor its serving port answered: a silent status alone says that we are blind, not
that nobody is served.
"""

from __future__ import annotations

from plimsoll_sidecar.detect.assessment import Kind, Suspicion
from plimsoll_sidecar.detect.pauses import Demand, Pauses
from plimsoll_sidecar.trace import Sample, SampleLoad

MARGIN_S = 4.0
"""Beyond the longest pause of the history; with sampling and a round of doubt within 10 s."""
FRONTEND_FACTOR = 2.0
LONG_STEP_S = 3.0
"""Steps take milliseconds, or a second with a large prompt: one that takes longer compiles, moves
much at once, or hangs."""
MAX_STEP_INTERVALS = 5.0
"""The longest gap between two samples that counts as time seen, in intervals."""
UNANSWERED_S = 8.0
"""It may be as long as this at any interval: an engine that answers neither at its status nor at
its serving port is waited for at both."""


class StallWatch:
    """The clocks of one epoch."""

    def __init__(self, timeout_s: float, interval_s: float) -> None:
        self.timeout_s = timeout_s
        self._longest_step_s = max(MAX_STEP_INTERVALS * interval_s, UNANSWERED_S)
        self._last_t: float | None = None
        self._progress: tuple[int, ...] | None = None
        self._pauses = Pauses()
        self._demand = Demand()
        self._prompt_tokens: int | None = None
        self._frozen_s = 0.0
        self._silent_s = 0.0
        self._answered = False

    def update(self, sample: Sample) -> Suspicion | None:
        """The stall that stands after this sample, if any."""
        step = 0.0 if self._last_t is None else max(0.0, sample.t - self._last_t)
        step = min(step, self._longest_step_s)
        self._last_t = sample.t
        if not sample.scrape_ok:
            if self._answered and sample.host.processes and sample.serving is False:
                self._silent_s += step
            elif sample.serving:
                self._silent_s = 0.0
            return self._suspicion()
        self._answered, self._silent_s = True, 0.0
        progress, under_way = _progress(sample.load), work(sample.load)
        if progress is None or under_way is None:
            return self._suspicion()
        taken_in = sample.load.prompt_tokens_total
        if under_way == 0:
            self._begin(0, taken_in)
        elif progress == self._progress:
            self._frozen_s += step
            self._grow(under_way, taken_in)
        else:
            self._grow(under_way, taken_in)
            if self._progress is not None:
                self._pauses.add(self._frozen_s + step, self._demand)
            self._begin(under_way, taken_in)
        self._progress = progress
        return self._suspicion()

    @property
    def in_long_step(self) -> bool:
        """Whether a step is under way that takes unusually long; False where steps are unknown."""
        return self._frozen_s >= LONG_STEP_S

    def _begin(self, under_way: int, taken_in: int | None) -> None:
        self._frozen_s, self._demand, self._prompt_tokens = 0.0, Demand(under_way), taken_in

    def _grow(self, under_way: int, taken_in: int | None) -> None:
        """What was asked for since the last progress."""
        tokens = 0
        if taken_in is not None and self._prompt_tokens is not None:
            tokens = max(0, taken_in - self._prompt_tokens)
        self._demand = Demand(max(self._demand.under_way, under_way), tokens)

    def _suspicion(self) -> Suspicion | None:
        longest = self._pauses.longest_s(self._demand)
        patience = self.timeout_s
        told = f"requests are in flight and no step was made for {self._frozen_s:.0f} s"
        if longest is not None and longest + MARGIN_S < patience:
            patience = longest + MARGIN_S
            told += f"; this service never paused for more than {longest:.0f} s at such load"
        if self._frozen_s >= patience:
            return self._stall(self._frozen_s / patience, told, "worker")
        silent = self.timeout_s * FRONTEND_FACTOR
        if self._silent_s >= silent:
            told = (
                "the engine's processes live but neither its status nor its serving port answered "
                f"for {self._silent_s:.0f} s"
            )
            return self._stall(self._silent_s / silent, told, "frontend")
        return None

    @staticmethod
    def _stall(ratio: float, told: str, process: str) -> Suspicion:
        return Suspicion(
            kind=Kind.STALL,
            segment=None,
            confidence=1.0,
            consumed_ratio=round(ratio, 3),
            over_budget=True,
            process=process,
            evidence=[told],
        )


def work(load: SampleLoad) -> int | None:
    """Requests under way: the frontend's count, or the engine's where that is higher."""
    gauges = [value for value in (load.running, load.waiting) if value is not None]
    counts = [sum(gauges)] if gauges else []
    if load.inflight is not None:
        counts.append(load.inflight)
    return max(counts, default=None)


def _progress(load: SampleLoad) -> tuple[int, ...] | None:
    """The counters that move with work that is done. Accepted requests are no progress."""
    if load.steps_total is not None:
        return (load.steps_total,)
    tokens = (load.generation_tokens_total, load.prompt_tokens_total)
    return tuple(value for value in tokens if value is not None) or None
