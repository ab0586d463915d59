"""What is read out of the metrics pages of engines that are not ours.

Tests ``act/adapters/external_profile.py``, ``signals/metrics_page.py`` and
``act/adapters/external_load.py``.
"""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_sidecar.act.adapters.external_load import (
    MIN_CONSISTENT_PAGES,
    ExternalLoad,
    read_load,
)
from plimsoll_sidecar.act.adapters.external_profile import SGLANG, VLLM, EngineProfile
from plimsoll_sidecar.signals.metrics_page import MAX_LINE_BYTES, Series, make_page_reader

VLLM_PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2e+03
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 900.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 5.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 77.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 2100.0
"""
SGLANG_PAGE = b"""sglang:num_running_reqs{model_name="m"} 1.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
sglang:prompt_tokens_total{model_name="m"} 10.0
sglang:generation_tokens_total{model_name="m"} 20.0
"""


def test_vllm_names_are_summed_over_engines_and_created_is_no_counter() -> None:
    load = read_load(make_page_reader(VLLM.iterate_series())(VLLM_PAGE), VLLM)
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage_ratio) == (5, 4, 0.25)
    assert (load.prompt_tokens_total, load.generation_tokens_total) == (1200, 900)
    assert (load.requests_total, load.aborted_total, load.steps_total) == (8, 1, 77)
    assert load.preemptions_total is None, "what the page lacks is unknown"


def test_sglang_tokens_say_nothing_of_progress_without_steps() -> None:
    read = make_page_reader(SGLANG.iterate_series())
    load = read_load(read(SGLANG_PAGE), SGLANG)
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage_ratio) == (1, 0, 0.5)
    assert load.generation_tokens_total is None
    steps = b"sglang:time_to_first_token_seconds_count 2\n"
    steps += b"sglang:inter_token_latency_seconds_count 40\n"
    load = read_load(read(SGLANG_PAGE + steps), SGLANG)
    assert load is not None
    assert (load.steps_total, load.generation_tokens_total) == (42, 20)


PASSES = b"""sglang:cuda_graph_passes_total{mode="prefill_none",model_name="m"} 5.0
sglang:cuda_graph_passes_total{mode="decode_cuda_graph",model_name="m"} %d.0
sglang:time_to_first_token_seconds_count{model_name="m"} 5.0
"""


def test_sglang_s_steps_are_its_forward_passes() -> None:
    """Answers of less than 50 tokens, unless streamed, leave no latency between two tokens."""
    load = read_load(make_page_reader(SGLANG.iterate_series())(SGLANG_PAGE + PASSES % 95), SGLANG)
    assert load is not None
    assert (load.steps_total, load.generation_tokens_total) == (100, 20)


def test_sglang_s_requests_count_once_while_it_serves() -> None:
    """Where no step was known, those at the door were added to those that ran."""
    now = [0.0]
    door = b'sglang:http_requests_active{endpoint="/generate",method="POST"} %d.0\n'
    pages = [SGLANG_PAGE + PASSES % (90 + at) + door % (at % 2) for at in range(6)]
    load = ExternalLoad(Pages(*pages), SGLANG, lambda: now[0])  # type: ignore[arg-type]
    for _ in pages:
        newest = load.get_newest_load()
        assert newest is not None
        assert newest[0].inflight == newest[0].running == 1
        now[0] += 2.0


def figures(page: bytes, *series: Series) -> list[float | None]:
    found = make_page_reader(series)(page)
    return [found.compute_value(one) for one in series]


A, B = Series("a_total"), Series("b_total")


def test_what_is_no_number_is_unknown_and_labels_may_hold_anything() -> None:
    only = Series("a_total", only_label=("x", "y"))
    page = b'a_total{x="} 5"} 1\na_total{x="y",z="\\n"} 2 1700000000\n'
    assert figures(page, A, only) == [3.0, 2.0]
    assert figures(b'a_total{x="y"} 2 # {trace="1"} 0.5\n', A) == [2.0], "no exemplar"
    for bad in (b"NaN", b"+Inf", b"-1", b"x"):
        assert figures(b'a_total{x="w"} 1\na_total{x="y"} %s\n' % bad, A) == [None]
    assert figures(b"a_total_created 1\nba_total 2\n# a_total 3\n", A) == [None]
    assert figures(b"a_total 1\na_total 1\n", A) == [None], "nobody can say which is right"


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_error(page: bytes) -> None:
    assert figures(page + b"\na 1\n", Series("a"))[0] in (None, 1.0)


def test_a_label_of_megabytes_takes_no_memory_and_leaves_its_name_unknown() -> None:
    """The matcher kept a state for each character: 630 MiB for a label of 4 MiB."""
    label = b'a\\"' * (1 << 20)
    page = b'a_total{x="' + label + b'"} 1\nb_total 2\na_total 3\n'
    only = Series("a_total", only_label=("x", "y"))
    tracemalloc.start()
    try:
        assert figures(page, A, only, B) == [None, None, 2.0]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_line_is_read_up_to_its_bound_and_one_that_is_malformed_is_unknown() -> None:
    a, b = Series("a"), Series("b")
    begin, end = b'a{x="', b'"} 1'
    longest = begin + b"x" * (MAX_LINE_BYTES - len(begin + end)) + end
    assert figures(longest + b"\nb 1", a, b) == [1.0, 1.0]
    assert figures(b"b 1\nx" + longest + b"\n" + longest + b"1", a, b) == [None, 1.0]
    assert figures(b'a{x="y 1\nb 1\na 1\n', a, b) == [None, 1.0]
    assert figures(b"a \nb 1", a, b) == [None, 1.0]


class Pages:
    """A server whose pages are given; None is no answer."""

    def __init__(self, *pages: bytes | None) -> None:
        self.pages = list(pages)

    def call(
        self, method: str, path: str, timeout_s: float, body: object = None
    ) -> tuple[int, bytes]:
        if path != "/metrics":
            return 404, b""
        page = self.pages.pop(0)
        return (503, b"") if page is None else (200, page)


class Replaced:
    """Whether the processes of the engine are others than at the last page."""

    def __init__(self) -> None:
        self.yes = False

    def __call__(self) -> bool:
        return self.yes


LOWER = VLLM_PAGE.replace(b"} 900.0", b"} 3.0")


def test_a_failed_scrape_is_no_information_and_no_fall_to_zero() -> None:
    now = [0.0]
    pages = Pages(VLLM_PAGE, None, VLLM_PAGE)
    load = ExternalLoad(pages, VLLM, lambda: now[0])  # type: ignore[arg-type]
    assert load.get_newest_load() is not None
    now[0] = 1.5
    newest = load.get_newest_load()
    assert newest is not None, "between two pages the last one counts"
    assert newest[1] == 1.5
    now[0] = 2.0
    assert load.get_newest_load() is None
    assert load.signal.reason == "MetricsSilent"
    now[0] = 4.0
    assert load.get_newest_load() is not None
    assert load.signal.ok


def test_a_fall_is_a_restart_where_the_processes_are_others() -> None:
    now, replaced = [0.0], Replaced()
    pages = Pages(VLLM_PAGE, LOWER, LOWER)
    load = ExternalLoad(pages, VLLM, lambda: now[0], are_helpers_replaced=replaced)  # type: ignore[arg-type]
    assert load.get_newest_load() is not None
    for at, replaced.yes in ((2.0, True), (4.0, False)):
        now[0] = at
        newest = load.get_newest_load()
        assert newest is not None
        assert newest[0].generation_tokens_total == 3
        assert load.restarts == 1


def test_pages_that_alternate_are_no_restarts_and_none_is_used() -> None:
    """Several servers with counters of their own share a port: no page is of the whole engine."""
    now = [0.0]
    load = ExternalLoad(Pages(*[VLLM_PAGE, LOWER] * 400), VLLM, lambda: now[0])  # type: ignore[arg-type]
    seen = []
    for _ in range(800):
        newest = load.get_newest_load()
        seen.append(newest is not None)
        now[0] += 2.0
    assert seen == [True] + [False] * 799
    assert load.restarts == 0
    assert load.signal.reason == "MetricsInconsistent"


def test_another_registry_shows_by_its_beginning_before_a_counter_falls() -> None:
    other = VLLM_PAGE.replace(b"900.0", b"901.0").replace(b"1.7e+09", b"1.8e+09")
    now = [0.0]
    load = ExternalLoad(Pages(VLLM_PAGE, other), VLLM, lambda: now[0])  # type: ignore[arg-type]
    assert load.get_newest_load() is not None
    now[0] = 2.0
    assert load.get_newest_load() is None
    assert load.signal.reason == "MetricsInconsistent"


def test_a_process_that_creates_its_counters_again_counts_on() -> None:
    """As vLLM does when elastic expert parallelism adds ranks. Each time, the load was unknown for
    ten minutes, and after the second time for good."""
    page = b"process_start_time_seconds 1.6e+09\n" + VLLM_PAGE
    again = page.replace(b"1.7e+09", b"1.8e+09").replace(b"} 900.0", b"} 0.0")
    later = again.replace(b"1.8e+09", b"1.9e+09")
    other = later.replace(b"1.6e+09", b"1.65e+09")
    pages = [page, again, again.replace(b"} 0.0", b"} 5.0"), later, later, other]
    now, seen = [0.0], []
    load = ExternalLoad(Pages(*pages), VLLM, lambda: now[0])  # type: ignore[arg-type]
    for _ in pages:
        newest = load.get_newest_load()
        seen.append(newest and (newest[0].generation_tokens_total, newest[0].requests_total))
        now[0] += 2.0
    assert seen == [(900, 8), (900, 16), (905, 16), (905, 24), (905, 24), None]
    assert load.restarts == 0


def test_a_page_that_began_anew_once_is_used_again_after_a_while() -> None:
    now = [0.0]
    load = ExternalLoad(Pages(VLLM_PAGE, *[LOWER] * 400), VLLM, lambda: now[0])  # type: ignore[arg-type]
    known = []
    for _ in range(400):
        known.append(load.get_newest_load() is not None)
        now[0] += 2.0
    assert known == [True] + [False] * MIN_CONSISTENT_PAGES + [True] * (399 - MIN_CONSISTENT_PAGES)
    assert load.restarts == 0


def test_a_rank_that_leaves_is_no_fall_and_its_work_stays_done() -> None:
    both = b"".join(
        b'vllm:num_requests_running{engine="%d"} 1\nvllm:prompt_tokens_total{engine="%d"} 50\n'
        % (rank, rank)
        for rank in (0, 1)
    )
    one = b"\n".join(line for line in both.split(b"\n") if b'"0"' in line) + b"\n"
    now = [0.0]
    load = ExternalLoad(Pages(both, one, both), VLLM, lambda: now[0])  # type: ignore[arg-type]
    seen = []
    for _ in range(3):
        newest = load.get_newest_load()
        assert newest is not None
        seen.append((newest[0].running, newest[0].prompt_tokens_total))
        now[0] += 2.0
    assert seen == [(2, 100), (1, 100), (2, 100)]


class Door(Pages):
    """A server that counts requests where they enter."""

    entered = 0

    def call(
        self, method: str, path: str, timeout_s: float, body: object = None
    ) -> tuple[int, bytes]:
        if path == "/load":
            return 200, b'{"server_load": %d}' % self.entered
        return super().call(method, path, timeout_s, body)


IDLE = VLLM_PAGE.replace(b"} 2.0", b"} 0").replace(b"} 3.0", b"} 0").replace(b"} 4.0", b"} 0")


def test_requests_are_counted_at_the_door_of_an_engine_that_hangs_idle() -> None:
    door, now = Door(*[IDLE] * 3), [0.0]
    load = ExternalLoad(door, VLLM, lambda: now[0])  # type: ignore[arg-type]
    seen = []
    for at, entered in ((0.0, 1), (2.0, 4), (3.0, 4)):
        door.entered, now[0] = entered, at
        newest = load.get_newest_load()
        assert newest is not None
        seen.append((newest[0].running, newest[0].inflight))
    assert seen == [(0, 0), (0, 3), (0, 3)], "one that the server lost before is no work"


def test_a_request_that_the_engine_took_in_before_it_hung_counts_once() -> None:
    """Five clients seemed ten: growth at a load that was never so high is compared with nothing."""
    page = IDLE.replace(b'running{engine="0",model_name="m"} 0', b'running{engine="0"} %d')
    door, now = Door(page % 3, page % 5, page % 5), [0.0]
    load = ExternalLoad(door, VLLM, lambda: now[0])  # type: ignore[arg-type]
    seen = []
    for at, entered in ((0.0, 2), (2.0, 5), (3.0, 6)):
        door.entered, now[0] = entered, at
        newest = load.get_newest_load()
        assert newest is not None
        seen.append(newest[0].inflight)
    assert seen == [3, 5, 6]


def test_a_connection_that_waits_for_its_answer_is_work_without_a_count() -> None:
    now = [0.0]
    load = ExternalLoad(Pages(IDLE), VLLM, lambda: now[0], lambda: 2)  # type: ignore[arg-type]
    newest = load.get_newest_load()
    assert newest is not None
    assert newest[0].inflight == 2


def test_sglang_counts_its_requests_without_our_own() -> None:
    page = SGLANG_PAGE.replace(b'reqs{model_name="m"} 1.0', b"reqs{} 0")
    page += b'sglang:http_requests_active{endpoint="/metrics",method="GET"} 1.0\n'
    busy = page + b'sglang:http_requests_active{endpoint="/generate",method="POST"} 2.0\n'
    now = [0.0]
    load = ExternalLoad(Pages(page, busy), SGLANG, lambda: now[0])  # type: ignore[arg-type]
    newest = load.get_newest_load()
    assert newest is not None
    assert newest[0].inflight == 0
    now[0] = 2.0
    newest = load.get_newest_load()
    assert newest is not None
    assert newest[0].inflight == 2


def aborts(profile: EngineProfile, *pages: bytes, replaced: bool = False) -> list[int | None]:
    """What is counted after each page."""
    now, told = [0.0], []
    load = ExternalLoad(
        Pages(*pages),  # type: ignore[arg-type]
        profile,
        lambda: now[0],
        are_helpers_replaced=lambda: replaced,
    )
    for _ in pages:
        newest = load.get_newest_load()
        assert newest is not None
        told.append(newest[0].aborted_total)
        now[0] += 2.0
    return told


def vllm(begun: int, ended: int, running: int, waiting: int = 0, counted: int = 0) -> bytes:
    return b"""vllm:num_requests_running{engine="0"} %d
vllm:num_requests_waiting{engine="0"} %d
vllm:num_preemptions_total{engine="0"} 1
vllm:request_success_total{engine="0",finished_reason="stop"} %d
vllm:request_success_total{engine="0",finished_reason="abort"} %d
vllm:time_to_first_token_seconds_count{engine="0"} %d
""" % (running, waiting, ended, counted, begun)


def test_vllm_s_aborts_are_what_began_and_neither_ended_nor_runs() -> None:
    """Its own counter of them stays at zero when clients leave."""
    pages = [vllm(10, 6, 4), vllm(20, 10, 4), vllm(20, 10, 4), vllm(25, 10, 4), vllm(30, 21, 3)]
    assert aborts(VLLM, *pages) == [0, 0, 6, 6, 6], "what two pages say is certain"
    assert aborts(VLLM, *[vllm(20, 10, 0, waiting=9)] * 2) == [9, 9], "one waits again"
    assert aborts(VLLM, *[vllm(20, 17, 0, counted=5)] * 2) == [5, 5], "a version that counts them"


@pytest.mark.parametrize("lost", [b"vllm:num_requests_waiting", b"vllm:time_to_first_token"])
def test_no_abort_is_found_or_lost_while_a_line_is_missing(lost: bytes) -> None:
    """Preempted requests seemed aborted, and those that were aborted seemed not to be."""
    before, now = vllm(20, 10, 0), vllm(26, 10, 0, waiting=6)
    missing = b"\n".join(line for line in now.split(b"\n") if not line.startswith(lost))
    assert aborts(VLLM, before, before, missing, missing) == [10, 10, 10, 10]


def test_the_aborts_of_another_start_begin_at_zero() -> None:
    pages = [vllm(20, 10, 0), vllm(20, 10, 0), vllm(2, 2, 0), vllm(3, 2, 0), vllm(3, 2, 0)]
    assert aborts(VLLM, *pages, replaced=True)[1:] == [10, 0, 0, 1]


def test_sglang_s_aborts_are_none_before_the_first_and_unknown_without_a_counter() -> None:
    served = SGLANG_PAGE + b'sglang:http_requests_active{endpoint="/metrics"} 1.0\n'
    aborted = served + b'sglang:num_aborted_requests_total{model_name="m"} 3.0\n'
    assert aborts(SGLANG, SGLANG_PAGE, served, aborted) == [None, 0, 3]
    assert aborts(VLLM, VLLM_PAGE) == [1], "without a count of first tokens, its own"
