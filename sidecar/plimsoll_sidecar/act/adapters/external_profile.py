"""What is known of each external engine: its paths, and what its metrics page says.

vLLM: https://docs.vllm.ai/en/latest/api/vllm/entrypoints/ and its metrics page. ``/pause`` was
served by default in 0.14 and needs the development mode since 0.16, as ``/reset_*`` always did;
that mode is never switched on from here, for it opens ``/collective_rpc`` to everybody. SGLang:
https://docs.sglang.ai/ (native API, production metrics).

Not spoken: ``/sleep`` moves weights to host memory and ``/release_memory_occupation`` drops them.
Neither returns leaked memory, and both take the service away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from plimsoll_api.engines import EngineType
from plimsoll_sidecar.signals.metrics_page import Kind, Series


@dataclass(frozen=True)
class EngineProfile:
    """One kind of engine.

    ``alive`` is a cheap path that any answer to says that the frontend lives. ``trims``, ``pause``
    and ``resume`` are used only where the server has them, and ``paused`` says whether it is
    paused. ``metrics`` maps fields of :class:`~plimsoll_api.admin.Load` to what the page has of
    them. ``steps`` lists counters of the engine's steps, the best first, each a tuple that is
    added up; the first one counts of which the page has all. ``steps_are_progress`` says that
    tokens are counted when their request ends, so that only steps show that work goes on.
    ``load_path`` answers how many requests the server has not answered yet; ``entered`` is a metric
    that says the same, less those of ``entered_not``. ``begun`` and ``finished`` are counters of
    requests at their first token and at their end; ``aborts_since`` is on the pages of versions
    whose counter of aborts has no line before the first (see
    :mod:`plimsoll_sidecar.act.adapters.external_load`). ``version_paths`` name the version, the
    newest path first; ``prefix`` begins its metrics' names, and ``owner`` is what it calls itself
    in its list of models.
    """

    alive: str
    prefix: str = ""
    owner: str = ""
    version_paths: tuple[str, ...] = ()
    load_path: str | None = None
    entered: Series | None = None
    entered_not: Series | None = None
    begun: Series | None = None
    finished: Series | None = None
    aborts_since: Series | None = None
    trims: tuple[str, ...] = ()
    pause: str | None = None
    pause_body: bytes | None = None
    resume: str | None = None
    paused: str | None = None
    metrics: dict[str, Series] = field(default_factory=dict)
    steps: tuple[tuple[Series, ...], ...] = ()
    steps_are_progress: bool = False

    def series(self) -> Iterator[Series]:
        """Yield everything that is read from the metrics page."""
        yield from self.metrics.values()
        for counted in self.steps:
            yield from counted
        others = (
            self.entered,
            self.entered_not,
            self.begun,
            self.finished,
            self.aborts_since,
        )
        yield from (one for one in others if one is not None)


def _counter(name: str, **only: str) -> Series:
    return Series(name, Kind.COUNTER, only=next(iter(only.items()), None))


VLLM = EngineProfile(
    alive="/health",
    prefix="vllm",
    owner="vllm",
    version_paths=("/version",),
    load_path="/load",
    begun=_counter("vllm:time_to_first_token_seconds_count"),
    finished=_counter("vllm:request_success_total"),
    trims=("/reset_prefix_cache", "/reset_mm_cache"),
    # The engine is idle, or out of time: mode says it to newer versions, the other to 0.14.
    pause="/pause?mode=abort&wait_for_inflight_requests=false&clear_cache=false",
    resume="/resume",
    paused="/is_paused",
    # One line for each data-parallel rank (engine), and with Ray for each of its processes.
    metrics={
        "running": Series("vllm:num_requests_running"),
        "waiting": Series("vllm:num_requests_waiting"),
        "requests_total": _counter("vllm:request_success_total"),
        "aborted_total": _counter("vllm:request_success_total", finished_reason="abort"),
        "errors_total": _counter("vllm:request_success_total", finished_reason="error"),
        # Items of any kind that were looked up in the processor's cache: images, mostly.
        "images_total": _counter("vllm:mm_cache_queries_total"),
        "prompt_tokens_total": _counter("vllm:prompt_tokens_total"),
        "generation_tokens_total": _counter("vllm:generation_tokens_total"),
        "preemptions_total": _counter("vllm:num_preemptions_total"),
        "kv_usage_ratio": Series(
            "vllm:kv_cache_usage_perc",
            Kind.RATIO,
            older=("vllm:gpu_cache_usage_perc",),
            pool="vllm:cache_config_info",
            pool_in="num_gpu_blocks",
        ),
    },
    steps=((_counter("vllm:iteration_tokens_total_count"),),),
)
_HTTP = "sglang:http_requests_active"
SGLANG = EngineProfile(
    # Its /health makes the model generate a token unless a variable forbids it.
    alive="/v1/models",
    prefix="sglang",
    owner="sglang",
    version_paths=("/server_info", "/get_server_info"),
    entered=Series(_HTTP),
    # What the page is asked for by is always one of them.
    entered_not=Series(_HTTP, only=("endpoint", "/metrics")),
    aborts_since=Series(_HTTP),
    trims=("/flush_cache",),
    pause="/pause_generation",
    pause_body=b'{"mode": "abort"}',
    resume="/continue_generation",
    # One line for each data-parallel rank (dp_rank), and on request for each rank within it
    # (tp_rank, pp_rank, moe_ep_rank), all of which report the same requests. With priorities,
    # some versions have a line for each of them beside that of their sum.
    metrics={
        "running": Series("sglang:num_running_reqs", total="priority"),
        "waiting": Series("sglang:num_queue_reqs", total="priority"),
        "requests_total": _counter("sglang:num_requests_total"),
        "aborted_total": _counter("sglang:num_aborted_requests_total"),
        "prompt_tokens_total": _counter("sglang:prompt_tokens_total"),
        "generation_tokens_total": _counter("sglang:generation_tokens_total"),
        "kv_usage_ratio": Series(
            "sglang:token_usage", Kind.RATIO, pool="sglang:max_total_num_tokens"
        ),
    },
    steps=(
        # Every forward pass, with a CUDA graph or without (its mode).
        (_counter("sglang:cuda_graph_passes_total"),),
        # Older versions; the second name is of streams and of answers from 50 tokens on alone.
        (
            _counter("sglang:time_to_first_token_seconds_count"),
            _counter("sglang:inter_token_latency_seconds_count"),
        ),
    ),
    steps_are_progress=True,
)
GENERIC = EngineProfile(alive="/health")

PROFILES = {
    EngineType.VLLM: VLLM,
    EngineType.SGLANG: SGLANG,
    EngineType.CUSTOM: GENERIC,
}
