"""Map the paths and metrics of vLLM and SGLang to load: requests running and waiting, and more.

Plimsoll never enables vLLM's development mode, because it opens ``/collective_rpc`` to every
client. ``/sleep`` and ``/release_memory_occupation`` are not used: they interrupt the service.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from plimsoll_api.engines import EngineType
from plimsoll_sidecar.signals.metrics_page import MetricKind, Series


@dataclass(frozen=True)
class EngineProfile:
    """Paths and metrics of one engine type.

    Attributes:
        health_path: A path that is cheap to serve. Any answer shows that the frontend is running.
        metric_prefix: The prefix of the engine's metrics.
        model_owner: The engine's name in the list of models.
        version_paths: Paths that return the version. Paths of newer versions are first.
        load_path: A path that returns the number of requests without a complete answer.
        inflight: A metric of the number of requests without a complete answer.
        inflight_excluded: A metric of requests that must be subtracted from ``inflight``.
        first_tokens: A counter of requests that have received their first token.
        finished_requests: A counter of requests that have ended.
        aborts_since: A metric that exists in all versions with a counter of aborts. The counter has
            no line before the first abort.
        deferred_requests: A gauge of waiting requests that cannot run yet.
        trim_paths: Paths that free memory. They are used only if the server has them.
        pause_path: A path that pauses the engine. It is used only if the server has it.
        pause_body: The body of the request to ``pause_path``; None without a body.
        resume_path: A path that resumes the engine. It is used only if the server has it.
        paused_path: A path that returns whether the engine is paused.
        transfers_path: A path that returns how many requests wait for another engine.
        metrics: Metrics by field of :class:`~plimsoll_api.admin.Load`.
        steps: Counters of the engine's steps, the preferred one first. Each counter is the sum of a
            tuple of metrics. The first tuple whose metrics are all on the page is used.
        steps_are_progress: Whether only steps show progress, because the engine counts the tokens
            of a request only when the request ends.

    """

    health_path: str
    metric_prefix: str = ""
    model_owner: str = ""
    version_paths: tuple[str, ...] = ()
    load_path: str | None = None
    inflight: Series | None = None
    inflight_excluded: Series | None = None
    first_tokens: Series | None = None
    finished_requests: Series | None = None
    aborts_since: Series | None = None
    deferred_requests: Series | None = None
    trim_paths: tuple[str, ...] = ()
    pause_path: str | None = None
    pause_body: bytes | None = None
    resume_path: str | None = None
    paused_path: str | None = None
    transfers_path: str | None = None
    metrics: dict[str, Series] = field(default_factory=dict)
    steps: tuple[tuple[Series, ...], ...] = ()
    steps_are_progress: bool = False

    def iterate_series(self) -> Iterator[Series]:
        """Yield all metrics that are read from the metrics page of this engine type."""
        yield from self.metrics.values()
        for counted in self.steps:
            yield from counted
        others = (
            self.inflight,
            self.inflight_excluded,
            self.first_tokens,
            self.finished_requests,
            self.aborts_since,
            self.deferred_requests,
        )
        yield from (series for series in others if series is not None)


def _make_counter(name: str, **only_label: str) -> Series:
    return Series(name, MetricKind.COUNTER, only_label=next(iter(only_label.items()), None))


VLLM = EngineProfile(
    health_path="/health",
    metric_prefix="vllm",
    model_owner="vllm",
    version_paths=("/version",),
    load_path="/load",
    first_tokens=_make_counter("vllm:time_to_first_token_seconds_count"),
    finished_requests=_make_counter("vllm:request_success_total"),
    # These requests wait for KV blocks of another engine, a client's next message, an adapter or a
    # grammar.
    deferred_requests=Series(
        "vllm:num_requests_waiting_by_reason", only_label=("reason", "deferred")
    ),
    trim_paths=("/reset_prefix_cache", "/reset_mm_cache"),
    # Abort requests if they run out of time. Newer versions read ``mode``, 0.14 the other option.
    pause_path="/pause?mode=abort&wait_for_inflight_requests=false&clear_cache=false",
    resume_path="/resume",
    paused_path="/is_paused",
    # One line for each data-parallel rank (engine), and with Ray for each of its processes.
    metrics={
        "running": Series("vllm:num_requests_running"),
        "waiting": Series("vllm:num_requests_waiting"),
        "requests_total": _make_counter("vllm:request_success_total"),
        "aborted_total": _make_counter("vllm:request_success_total", finished_reason="abort"),
        "errors_total": _make_counter("vllm:request_success_total", finished_reason="error"),
        # Lookups in the processor's cache, mostly of images.
        "images_total": _make_counter("vllm:mm_cache_queries_total"),
        "prompt_tokens_total": _make_counter("vllm:prompt_tokens_total"),
        "generation_tokens_total": _make_counter("vllm:generation_tokens_total"),
        "preemptions_total": _make_counter("vllm:num_preemptions_total"),
        "kv_usage_ratio": Series(
            "vllm:kv_cache_usage_perc",
            MetricKind.RATIO,
            older_names=("vllm:gpu_cache_usage_perc",),
            pool="vllm:cache_config_info",
            pool_label="num_gpu_blocks",
        ),
    },
    steps=((_make_counter("vllm:iteration_tokens_total_count"),),),
)
_HTTP_REQUESTS_METRIC = "sglang:http_requests_active"
SGLANG = EngineProfile(
    # SGLang's /health makes the model generate a token, unless a variable disables that.
    health_path="/v1/models",
    metric_prefix="sglang",
    model_owner="sglang",
    version_paths=("/server_info", "/get_server_info"),
    inflight=Series(_HTTP_REQUESTS_METRIC),
    # The scrape itself is always one of the active requests.
    inflight_excluded=Series(_HTTP_REQUESTS_METRIC, only_label=("endpoint", "/metrics")),
    aborts_since=Series(_HTTP_REQUESTS_METRIC),
    trim_paths=("/flush_cache",),
    pause_path="/pause_generation",
    pause_body=b'{"mode": "abort"}',
    resume_path="/continue_generation",
    # The page keeps the queues of the last step.
    transfers_path="/v1/loads?include=disagg",
    # One line for each data-parallel rank (dp_rank), and on request for each rank within it
    # (tp_rank, pp_rank, moe_ep_rank), all of which report the same requests. With priorities,
    # some versions have a line for each of them beside that of their sum.
    metrics={
        "running": Series("sglang:num_running_reqs", total="priority"),
        "waiting": Series("sglang:num_queue_reqs", total="priority"),
        "requests_total": _make_counter("sglang:num_requests_total"),
        "aborted_total": _make_counter("sglang:num_aborted_requests_total"),
        "prompt_tokens_total": _make_counter("sglang:prompt_tokens_total"),
        "generation_tokens_total": _make_counter("sglang:generation_tokens_total"),
        "kv_usage_ratio": Series(
            "sglang:token_usage", MetricKind.RATIO, pool="sglang:max_total_num_tokens"
        ),
    },
    steps=(
        # Every forward pass, with a CUDA graph or without (its mode).
        (_make_counter("sglang:cuda_graph_passes_total"),),
        # Older versions; the second one counts only streams and answers of 50 tokens or more.
        (
            _make_counter("sglang:time_to_first_token_seconds_count"),
            _make_counter("sglang:inter_token_latency_seconds_count"),
        ),
    ),
    steps_are_progress=True,
)
GENERIC = EngineProfile(health_path="/health")

ENGINE_PROFILES = {
    EngineType.VLLM: VLLM,
    EngineType.SGLANG: SGLANG,
    EngineType.CUSTOM: GENERIC,
}
