"""Stalls of engines whose load is read from a page at intervals, as they say nothing themselves.

The figures are vLLM's on a slow CPU: a hundred steps a second, and 45 s for the first request with
logprobs, all of them spent computing.

Tests ``detect/stall.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from plimsoll_api.assessment import Suspicion
from plimsoll_api.trace import Host, Sample, SampleLoad
from plimsoll_sidecar.detect.stall import MIN_MAIN_PROCESS_ABSENCE_S, StallWatch

PAGE_S = 2.0
ROUND_DURATION_S = 5.0
"""What the governor needs to believe a stall, at one sample a second."""
TIMEOUT_S = 120.0


@dataclass
class External:
    """An engine that serves from 0 on, and its page, read every two seconds, each second while
    nothing moves."""

    running: int = 4
    steps: int = 0
    rate: int = 100
    cpu_s: float | None = 0.0
    t: float = 0.0
    page_t: float = -PAGE_S
    entered: int = 0
    page: tuple[int, int, int] = (0, 0, 0)

    def sample(self) -> Sample:
        if self.t - self.page_t >= (PAGE_S if self.page[0] != self.steps else 1.0):
            self.page, self.page_t = (self.steps, self.running, self.entered), self.t
        steps, running, entered = self.page
        load = SampleLoad(running=running, waiting=0, inflight=running + entered)
        load.steps_total = steps
        return Sample(
            t=self.t, epoch=1, load=load, load_age_s=self.t - self.page_t,
            host=Host(processes=3, frontend_lives=True, cpu_s=self.cpu_s),
        )  # fmt: skip

    def compute(self, seconds: float) -> None:
        if self.cpu_s is not None:
            self.cpu_s += seconds

    def serve(self, watch: StallWatch, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.t, self.steps = self.t + 1, self.steps + self.rate
            self.compute(0.8)
            assert watch.update(self.sample()) is None

    def hang(
        self, watch: StallWatch, limit_s: float, cpu: float = 0.0
    ) -> tuple[float | None, Suspicion | None]:
        """Seconds until a stall was suspected, None for none within ``limit_s``."""
        begin = self.t
        while self.t - begin < limit_s:
            self.t += 1
            self.compute(cpu)
            suspicion = watch.update(self.sample())
            if suspicion is not None:
                return self.t - begin, suspicion
        return None, None


@pytest.mark.parametrize("rate", [100, 3])
@pytest.mark.parametrize(("served_s", "within_s"), [(300, 20.0), (3600, 20.0), (62, 30.0)])
@pytest.mark.parametrize("busy", [True, False])
def test_a_hang_is_confirmed_soon_once_the_engine_has_served(
    served_s: float, within_s: float, busy: bool, rate: int
) -> None:
    """Three steps a second are SGLang's on a CPU that other programs keep busy."""
    engine, watch = External(rate=rate), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, served_s)
    if not busy:
        engine.running = 0
        for _ in range(20):
            engine.t += 1
            assert watch.update(engine.sample()) is None
        engine.entered = 40  # many more than it ever ran, for they come and nobody goes
    seconds, suspicion = engine.hang(watch, 120)
    assert suspicion is not None
    assert seconds is not None
    assert seconds + ROUND_DURATION_S <= within_s


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("rate", [100, 12])
def test_a_hang_in_the_first_minute_is_confirmed_soon_where_the_engine_rests(
    rate: int, busy: bool
) -> None:
    """A scheduler of SGLang that was stopped after five seconds was given its timeout of 120 s."""
    engine, watch = External(rate=rate), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 6)
    if not busy:
        engine.running = 0
        for _ in range(4):
            engine.t += 1
            assert watch.update(engine.sample()) is None
        engine.entered = 5
    seconds, suspicion = engine.hang(watch, 120, cpu=0.02)
    assert suspicion is not None
    assert seconds is not None
    assert 21 <= seconds <= 30 - ROUND_DURATION_S


@pytest.mark.parametrize("cpu", [0.2, 0.6])
def test_what_computes_in_the_first_minute_is_no_stall(cpu: float) -> None:
    """The first request with logprobs, also where other programs leave it a fifth of a core."""
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 6)
    assert engine.hang(watch, 110, cpu=cpu) == (None, None)
    engine.serve(watch, 60)


def test_without_its_processor_time_the_first_minute_has_the_timeout() -> None:
    """Unknown is never zero: such an engine may compute."""
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 6)
    engine.cpu_s = None
    assert engine.hang(watch, 110) == (None, None)


def test_the_few_steps_of_a_warm_up_are_no_history() -> None:
    """SGLang asks itself for eight tokens when it starts: a long prompt may come next."""
    engine, watch = External(rate=5), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 3)
    assert engine.hang(watch, 110) == (None, None)


def test_service_counts_where_the_gauge_is_often_zero() -> None:
    """SGLang writes its gauge every forty steps: a page that says 0 may come from a busy second."""
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    for second in range(300):
        engine.running = 4 if second % 10 < 5 else 0
        engine.serve(watch, 1)
    engine.running = 4
    engine.serve(watch, 5)
    seconds, suspicion = engine.hang(watch, 120)
    assert suspicion is not None
    assert seconds is not None
    assert seconds + ROUND_DURATION_S <= 20.0


@pytest.mark.parametrize("served_s", [62, 300, 3600])
def test_a_request_that_computes_for_most_of_a_minute_is_no_stall(served_s: float) -> None:
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, served_s)
    assert engine.hang(watch, 46, cpu=0.6) == (None, None)
    engine.serve(watch, 60)


def test_a_compilation_does_not_make_later_stalls_late() -> None:
    """As the first request with logprobs did with vLLM 0.32: the next stall took 65 s."""
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    assert engine.hang(watch, 46, cpu=0.6) == (None, None)
    engine.serve(watch, 60)
    seconds, _ = engine.hang(watch, 120)
    assert seconds is not None
    assert seconds + ROUND_DURATION_S <= 20


def test_an_endless_loop_computes_and_is_a_stall_all_the_same() -> None:
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    seconds, suspicion = engine.hang(watch, 120, cpu=1.0)
    assert seconds is not None
    assert seconds <= 65
    assert suspicion is not None
    assert "used the CPU throughout" in suspicion.evidence[0]


def test_an_engine_that_makes_few_steps_is_given_its_timeout() -> None:
    """One step in 40 s: half a minute of silence is nothing."""
    engine, watch = External(rate=0), StallWatch(TIMEOUT_S, 1.0)
    for _ in range(10):
        engine.steps += 1
        engine.serve(watch, 40)
    assert engine.hang(watch, 60) == (None, None)


def test_the_first_request_of_all_may_take_its_time() -> None:
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    assert engine.hang(watch, 110, cpu=0.0) == (None, None)


@pytest.mark.parametrize(("given_up_s", "again_s"), [(60, 1), (60, 20), (10, 5), (30, 3)])
def test_clients_that_give_up_do_not_hide_a_hang(given_up_s: int, again_s: int) -> None:
    """A proxy's usual timeout is shorter than that of an engine that has just started."""
    engine, watch = External(rate=1), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 3)
    found, waited = None, 0
    while found is None and waited < 4 * TIMEOUT_S:
        engine.running = 0
        if (found := engine.hang(watch, again_s)[1]) is None:
            engine.running = 3
            found = engine.hang(watch, given_up_s)[1]
            waited += given_up_s
    assert found is not None
    assert waited <= TIMEOUT_S + 3 * given_up_s


def test_requests_that_are_rarely_given_up_are_no_hang() -> None:
    """An engine that reports no steps looks like this if clients do not wait for long prompts."""
    engine, watch = External(rate=1), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 3)
    for _ in range(40):
        engine.running = 3
        assert engine.hang(watch, 15) == (None, None)
        engine.running = 0
        assert engine.hang(watch, 30) == (None, None)


def test_the_page_that_is_read_again_is_no_silence() -> None:
    """A page every five seconds of an engine that works is no step of five seconds."""
    watch = StallWatch(TIMEOUT_S, 1.0)
    engine = External()
    for _ in range(60):
        engine.t, engine.steps = engine.t + 1, engine.steps + 100
        watch.update(engine.sample())
        assert not watch.is_in_long_step


def test_a_pause_that_the_service_makes_is_known_soon() -> None:
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    assert engine.hang(watch, 7) == (None, None)
    engine.serve(watch, 10)
    assert engine.hang(watch, 10) == (None, None)


def test_a_frontend_that_ended_and_left_its_processes_is_a_stall() -> None:
    watch = StallWatch(TIMEOUT_S, 1.0)
    for second in range(60):
        host = Host(processes=2, frontend_lives=False)
        suspicion = watch.update(Sample(t=second, epoch=1, host=host, scrape_ok=False))
        assert (suspicion is not None) == (second >= MIN_MAIN_PROCESS_ABSENCE_S)
    assert suspicion is not None
    assert suspicion.process == "frontend"
    ended = Sample(t=60, epoch=1, host=Host(processes=0, frontend_lives=False), scrape_ok=False)
    assert StallWatch(TIMEOUT_S, 1.0).update(ended) is None


@pytest.mark.parametrize("period_s", [1.0, 2.0, 5.0])
def test_a_request_after_a_lull_is_no_long_step(period_s: float) -> None:
    """It came since the last page, nobody knows when: its first step is not as old as that page."""
    engine, watch = External(running=0, steps=100), StallWatch(TIMEOUT_S, period_s)
    for second in range(0, 300, int(period_s)):
        engine.t = float(second)
        engine.page, engine.page_t = (engine.steps, engine.running, 0), engine.t
        watch.update(engine.sample())
        assert not watch.is_in_long_step
        # Seen at work once, and idle again with its steps made at the next page.
        engine.running = 1 - engine.running
        engine.steps += 50 * (1 - engine.running)


def test_a_page_that_cannot_be_read_leaves_everything_as_it_was() -> None:
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 3600)
    assert engine.hang(watch, 5) == (None, None)
    assert watch.is_in_long_step
    for _ in range(20):
        engine.t += 1
        blind = engine.sample()
        blind.load, blind.load_age_s = SampleLoad(), None
        assert watch.update(blind) is None
        assert watch.is_in_long_step


def held(engine: External, watch: StallWatch, seconds: int, paused: bool | None = True) -> bool:
    """Whether a stall is suspected while the engine makes no step and says this of a pause."""
    for _ in range(seconds):
        engine.t += 1
        sample = engine.sample()
        sample.load.paused = paused
        if watch.update(sample) is not None:
            return True
    return False


def test_a_first_pause_that_the_engine_tells_of_is_no_stall() -> None:
    """VLLM's ``/pause?mode=keep``: its requests stay in flight, for hours if need be."""
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    assert not held(engine, watch, 3600)
    engine.serve(watch, 300)


@pytest.mark.parametrize("told", [False, None])
def test_a_pause_that_is_denied_or_unknown_is_judged_as_before(told: bool | None) -> None:
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    assert held(engine, watch, 20, told)


def test_a_hang_after_a_pause_is_a_stall_and_the_pause_is_no_history() -> None:
    """The pause says nothing of how long this engine takes for a step."""
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    assert not held(engine, watch, 600)
    engine.serve(watch, 60)
    seconds, suspicion = engine.hang(watch, 120)
    assert suspicion is not None
    assert seconds is not None
    assert seconds <= 20


def test_an_engine_that_does_not_go_on_after_a_pause_is_a_stall() -> None:
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    assert not held(engine, watch, 600)
    assert held(engine, watch, int(TIMEOUT_S) + 5, None)


def test_pauses_one_after_the_other_do_not_hide_a_hang() -> None:
    """A trainer pauses its engine every minute for new weights: what it does between counts."""
    engine, watch = External(), StallWatch(TIMEOUT_S, 1.0)
    engine.serve(watch, 300)
    for _ in range(6):
        if held(engine, watch, 10, True) or held(engine, watch, 30, False):
            return
    raise AssertionError("no stall in three minutes without a step")
