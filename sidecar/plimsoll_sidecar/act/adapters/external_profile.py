"""What is known of each external engine: its paths and the names of its metrics.

vLLM: https://docs.vllm.ai/en/latest/api/vllm/entrypoints/ and its metrics page. ``/pause`` was
served by default in 0.14 and needs the development mode since 0.16, as ``/reset_*`` always did;
that mode is never switched on from here, for it opens ``/collective_rpc`` to everybody. SGLang:
https://docs.sglang.ai/ (native API, production metrics).

Not spoken: ``/sleep`` moves weights to host memory and ``/release_memory_occupation`` drops them.
Neither returns leaked memory, and both take the service away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plimsoll_api.engines import EngineType


@dataclass(frozen=True)
class EngineProfile:
    """One kind of engine.

    ``alive`` is a cheap path that any answer to says that the frontend lives. ``trims``, ``pause``
    and ``resume`` are used only where the server has them, and ``paused`` says whether it is
    paused. ``metrics`` maps fields of :class:`~plimsoll_api.admin.Load` to sample names that are
    summed; ``usage`` names a gauge from 0 to 1, the newest name first. ``steps`` lists counters of
    the engine's steps, the best first, each a tuple of names that are summed; the first one counts
    of which the page has all names. ``steps_are_progress`` says that tokens are counted when their
    request ends, so that only steps show that work goes on. ``load_path`` answers how many requests
    the server has not answered yet; ``entered`` are metrics that say the same, less those of
    ``entered_not``. ``begun`` and ``finished`` are counters of requests at their first token and at
    their end; ``aborts_since`` is on the pages of versions whose counter of aborts has no line
    before the first (see :mod:`plimsoll_sidecar.act.adapters.external_load`). ``version_paths``
    name the version, the newest path first; ``prefix`` begins its metrics' names, and ``owner`` is
    what it calls itself in its list of models.
    """

    alive: str
    prefix: str = ""
    owner: str = ""
    version_paths: tuple[str, ...] = ()
    load_path: str | None = None
    entered: tuple[str, ...] = ()
    entered_not: tuple[str, ...] = ()
    begun: str = ""
    finished: str = ""
    aborts_since: str = ""
    trims: tuple[str, ...] = ()
    pause: str | None = None
    pause_body: bytes | None = None
    resume: str | None = None
    paused: str | None = None
    metrics: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steps: tuple[tuple[str, ...], ...] = ()
    steps_are_progress: bool = False

    @property
    def names(self) -> set[str]:
        """Every sample name that is read from the metrics page."""
        groups = (*self.metrics.values(), *self.steps, self.entered, self.entered_not)
        return {name for group in groups for name in group} | (
            {self.begun, self.finished, self.aborts_since} - {""}
        )


VLLM = EngineProfile(
    alive="/health",
    prefix="vllm:",
    owner="vllm",
    version_paths=("/version",),
    load_path="/load",
    begun="vllm:time_to_first_token_seconds_count",
    finished="vllm:request_success_total",
    trims=("/reset_prefix_cache", "/reset_mm_cache"),
    # The engine is idle, or out of time: mode says it to newer versions, the other to 0.14.
    pause="/pause?mode=abort&wait_for_inflight_requests=false&clear_cache=false",
    resume="/resume",
    paused="/is_paused",
    metrics={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "requests_total": ("vllm:request_success_total",),
        "aborted_total": ('vllm:request_success_total{finished_reason="abort"}',),
        "errors_total": ('vllm:request_success_total{finished_reason="error"}',),
        # Items of any kind that were looked up in the processor's cache: images, mostly.
        "images_total": ("vllm:mm_cache_queries_total",),
        "prompt_tokens_total": ("vllm:prompt_tokens_total",),
        "generation_tokens_total": ("vllm:generation_tokens_total",),
        "preemptions_total": ("vllm:num_preemptions_total",),
        "kv_usage_ratio": ("vllm:kv_cache_usage_perc",),
    },
    steps=(("vllm:iteration_tokens_total_count",),),
)
SGLANG = EngineProfile(
    # Its /health makes the model generate a token unless a variable forbids it.
    alive="/v1/models",
    prefix="sglang:",
    owner="sglang",
    version_paths=("/server_info", "/get_server_info"),
    entered=("sglang:http_requests_active",),
    # What the page is asked for by is always one of them.
    entered_not=('sglang:http_requests_active{endpoint="/metrics"}',),
    aborts_since="sglang:http_requests_active",
    trims=("/flush_cache",),
    pause="/pause_generation",
    pause_body=b'{"mode": "abort"}',
    resume="/continue_generation",
    metrics={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "requests_total": ("sglang:num_requests_total",),
        "aborted_total": ("sglang:num_aborted_requests_total",),
        "prompt_tokens_total": ("sglang:prompt_tokens_total",),
        "generation_tokens_total": ("sglang:generation_tokens_total",),
        "kv_usage_ratio": ("sglang:token_usage",),
    },
    steps=(
        # Every forward pass, with a CUDA graph or without (its mode).
        ("sglang:cuda_graph_passes_total",),
        # Older versions; the second name is of streams and of answers from 50 tokens on alone.
        (
            "sglang:time_to_first_token_seconds_count",
            "sglang:inter_token_latency_seconds_count",
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
