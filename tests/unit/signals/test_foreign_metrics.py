"""What is read out of the metrics pages of engines that are not ours."""

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_sidecar.act.dialect import SGLANG, VLLM
from plimsoll_sidecar.act.foreign_load import ForeignLoad, load_of
from plimsoll_sidecar.signals.prometheus import reader

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


def names(dialect):
    return {name for group in dialect.metrics.values() for name in group}


def test_vllm_names_are_summed_over_engines_and_created_is_no_counter() -> None:
    load = load_of(reader(names(VLLM))(VLLM_PAGE), VLLM)
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage_ratio) == (5, 4, 0.25)
    assert (load.prompt_tokens_total, load.generation_tokens_total) == (1200, 900)
    assert (load.requests_total, load.aborted_total, load.steps_total) == (8, 1, 77)
    assert load.preemptions_total is None, "what the page lacks is unknown"


def test_sglang_tokens_say_nothing_of_progress_without_steps() -> None:
    read = reader(names(SGLANG))
    load = load_of(read(SGLANG_PAGE), SGLANG)
    assert load is not None
    assert (load.running, load.waiting, load.kv_usage_ratio) == (1, 0, 0.5)
    assert load.generation_tokens_total is None
    steps = b"sglang:time_to_first_token_seconds_count 2\n"
    steps += b"sglang:inter_token_latency_seconds_count 40\n"
    load = load_of(read(SGLANG_PAGE + steps), SGLANG)
    assert load is not None
    assert (load.steps_total, load.generation_tokens_total) == (42, 20)


def test_what_is_no_number_is_unknown_and_labels_may_hold_anything() -> None:
    read = reader(["a_total", 'a_total{x="y"}'])
    assert read(b'a_total{x="} 5"} 1\na_total{x="y",z="\\n"} 2 1700000000\n') == {
        "a_total": 3.0,
        'a_total{x="y"}': 2.0,
    }
    assert read(b'a_total{x="y"} 2 # {trace="1"} 0.5\n')["a_total"] == 2.0, "no exemplar"
    assert read(b"a_total NaN\n") == {}
    assert read(b'a_total{x="w"} 1\na_total{x="y"} +Inf\n') == {}
    assert read(b"a_total_created 1\nba_total 2\n# a_total 3\n") == {}


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_error(page: bytes) -> None:
    assert set(reader(["a"])(page + b"\na 1\n")) <= {"a"}


class Pages:
    """A server whose pages are given; None is no answer."""

    def __init__(self, *pages: bytes | None) -> None:
        self.pages = list(pages)

    def call(self, method, path, timeout_s, body=None):
        page = self.pages.pop(0)
        return (503, b"") if page is None else (200, page)


def test_a_failed_scrape_is_no_information_and_a_fall_is_a_restart() -> None:
    lower = VLLM_PAGE.replace(b"} 900.0", b"} 3.0")
    now = [0.0]
    pages = Pages(VLLM_PAGE, None, VLLM_PAGE, lower, lower)
    load = ForeignLoad(pages, VLLM, lambda: now[0])  # type: ignore[arg-type]
    assert load.newest() is not None
    now[0] = 4.0
    newest = load.newest()
    assert newest is not None, "between two pages the last one counts"
    assert newest[1] == 4.0
    now[0] = 5.0
    assert load.newest() is None
    now[0] = 10.0
    assert load.newest() is not None
    assert load.restarts == 0, "a page that failed is no fall to zero"
    for at in (15.0, 20.0):
        now[0] = at
        assert load.newest() is not None
        assert load.restarts == 1
