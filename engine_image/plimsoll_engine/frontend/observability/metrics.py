"""Prometheus metrics of the serving API, named as in vLLM, with Plimsoll's prefix.

These counters live as long as the process, across workers.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from plimsoll_api.admin import EngineState, LedgerEntry, Load
from plimsoll_engine.frontend.observability.http_metrics import HttpConnections
from plimsoll_engine.frontend.observability.ledger_metrics import (
    METRIC_PREFIX,
    MemoryMetrics,
    PickerMetrics,
)
from plimsoll_engine.frontend.observability.loop_blocks import LoopBlocks
from plimsoll_engine.frontend.requests.request_log import Generation
from plimsoll_engine.messages.handover import HandoverOutcome
from plimsoll_engine.messages.worker_ipc import FirstTokenStatistics, Report

# Nothing reads the _created series, and a sidecar with little memory parses the scrapes.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The bounds of vLLM's histograms of the same names, so that one dashboard reads both.
_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_E2E_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Metrics:
    """Metrics of one engine. The values of gauges are read at each scrape."""

    def __init__(
        self,
        model: str,
        get_state: Callable[[], EngineState],
        get_load: Callable[[], Load],
        list_injections: Callable[[], list[str]],
        list_ledger_entries: Callable[[], list[LedgerEntry]],
        compute_kv_usage: Callable[[], float | None],
        get_kv_pool_size: Callable[[], tuple[int, int] | None],
        list_adapters: Callable[[], list[str]],
        max_adapters: int,
    ) -> None:
        self.registry = CollectorRegistry()
        self.loop = LoopBlocks(model, self.registry)
        self.http = HttpConnections(self.registry)
        self.registry.register(
            MemoryMetrics(model, list_injections, list_ledger_entries, compute_kv_usage)
        )
        self.registry.register(
            PickerMetrics(
                model, get_load, compute_kv_usage, get_kv_pool_size, list_adapters, max_adapters
            )
        )
        self._add_gauges(model, get_state, get_load)
        self._prompt_tokens = self._add_counter(
            model, "prompt_tokens", "Number of prompt tokens received."
        )
        self._tokens = self._add_counter(model, "generation_tokens", "Tokens generated.")
        self._preemptions = self._add_counter(model, "num_preemptions", "Requests preempted.")
        self._hits = self._add_counter(
            model, "prefix_cache_hits", "Number of prompt tokens found in the prefix cache."
        )
        self._queries = self._add_counter(
            model, "prefix_cache_queries", "Number of prompt tokens looked up in the prefix cache."
        )
        self._drafts = self._add_counter(
            model,
            "spec_decode_num_drafts",
            "Verifications of draft tokens: one per request in each speculative step.",
        )
        self._draft_tokens = self._add_counter(
            model, "spec_decode_num_draft_tokens", "Number of draft tokens verified."
        )
        self._accepted_tokens = self._add_counter(
            model, "spec_decode_num_accepted_tokens", "Number of draft tokens accepted."
        )
        self._failed_streams = self._add_counter(
            model, "stream_errors", "Streams that ended with an error event after part of the text."
        )
        self._ttft = self._add_histogram(
            model,
            "time_to_first_token_seconds",
            "Time from admission to the first token.",
            _TTFT_BUCKETS_S,
        )
        self._queue = self._add_histogram(
            model,
            "request_queue_time_seconds",
            "Time from admission until the request first joins a batch.",
            _E2E_BUCKETS_S,
        )
        self._itl = self._add_histogram(
            model,
            "inter_token_latency_seconds",
            "Time between two tokens of a request.",
            _ITL_BUCKETS_S,
        )
        self._e2e = self._add_histogram(
            model,
            "e2e_request_latency_seconds",
            "Time from admission to the last token.",
            _E2E_BUCKETS_S,
        )
        self._requests = Counter(
            METRIC_PREFIX + "requests",
            "Requests by finish reason: stop, length, abort, error.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._starts = Counter(
            METRIC_PREFIX + "worker_starts",
            "Worker starts, by reason: initial, restart (on request) or crash.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._handovers = Counter(
            METRIC_PREFIX + "kv_handovers",
            "Planned restarts, by the outcome of their KV handover.",
            ["model_name", "outcome"],
            registry=self.registry,
        )
        for outcome in HandoverOutcome:
            self._handovers.labels(model, outcome)
        self._carried_prefill = self._add_counter(
            model, "carried_prefill_tokens", "Tokens computed again after planned restarts."
        )
        for reason in ("stop", "length", "abort", "error"):
            self._requests.labels(model, reason)
        for reason in ("initial", "restart", "crash"):
            self._starts.labels(model, reason)
        self._model = model
        self._last: Report | None = None

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_worker_start(self, reason: str) -> None:
        """Count a start of a worker by its ``reason``. The new worker's counters start at zero."""
        self._starts.labels(self._model, reason).inc()
        self._last = None

    def count_restart(self, outcome: HandoverOutcome, recomputed_tokens: int | None) -> None:
        """Count a planned restart by its ``outcome``, and add its recomputed tokens."""
        self._handovers.labels(self._model, outcome).inc()
        self._carried_prefill.inc(recomputed_tokens or 0)

    def add_report(self, report: Report) -> None:
        """Add the increase of the worker's counters since its previous report."""
        self._add_speculation(report)
        last = self._last
        gained = (report.load.preemptions_total or 0) - (
            (last.load.preemptions_total or 0) if last else 0
        )
        self._preemptions.inc(max(0, gained))
        hits = report.prefix_hit_tokens_total - (last.prefix_hit_tokens_total if last else 0)
        self._hits.inc(max(0, hits))
        queried = report.prefix_query_tokens_total - (last.prefix_query_tokens_total if last else 0)
        self._queries.inc(max(0, queried))
        self._last = report

    def _add_speculation(self, report: Report) -> None:
        last = self._last
        for counter, name in (
            (self._drafts, "drafts_total"),
            (self._draft_tokens, "draft_tokens_total"),
            (self._accepted_tokens, "accepted_tokens_total"),
        ):
            before = 0 if last is None else getattr(last, name)
            counter.inc(max(0, getattr(report, name) - before))

    def count_admitted(self, generation: Generation) -> None:
        """Count the prompt tokens of an admitted request."""
        self._prompt_tokens.inc(len(generation.prompt_ids))

    def observe_queue_time(self, statistics: FirstTokenStatistics) -> None:
        """Observe the queue time of a request."""
        self._queue.observe(statistics.queued_s)

    def observe_token(self, generation: Generation, now: float) -> None:
        """Observe the time to the first token, or the latency of a later token.

        ``now`` is a value of ``time.monotonic()``.
        """
        times = generation.times
        self._tokens.inc()
        if times.last_token is None:
            self._ttft.observe(now - times.arrived)
        else:
            self._itl.observe(now - times.last_token)
        times.last_token = now

    def count_finished(self, generation: Generation, reason: str) -> None:
        """Count a request by its finish ``reason``, and observe its latency if it is complete."""
        self._requests.labels(self._model, reason).inc()
        if generation.times.last_token is not None and reason in ("stop", "length"):
            self._e2e.observe(generation.times.last_token - generation.times.arrived)

    def count_stream_error(self) -> None:
        """Count a stream that ended with an error event."""
        self._failed_streams.inc()

    def _add_counter(self, model: str, name: str, description: str) -> Counter:
        family = Counter(METRIC_PREFIX + name, description, ["model_name"], registry=self.registry)
        return family.labels(model)

    def _add_histogram(
        self, model: str, name: str, description: str, buckets: tuple[float, ...]
    ) -> Histogram:
        family = Histogram(
            METRIC_PREFIX + name,
            description,
            ["model_name"],
            registry=self.registry,
            buckets=buckets,
        )
        return family.labels(model)

    def _add_gauges(
        self, model: str, get_state: Callable[[], EngineState], get_load: Callable[[], Load]
    ) -> None:
        def add_gauge(name: str, description: str, read_value: Callable[[], float]) -> None:
            family = Gauge(
                METRIC_PREFIX + name, description, ["model_name"], registry=self.registry
            )
            family.labels(model).set_function(read_value)

        nan = float("nan")  # unknown is not zero
        add_gauge("num_requests_running", "Requests in the running batch.",
              lambda: nan if (n := get_load().running) is None else n)  # fmt: skip
        add_gauge("num_requests_waiting", "Requests that wait for the batch.",
              lambda: nan if (n := get_load().waiting) is None else n)  # fmt: skip
        add_gauge("num_requests_compiling", "Waiting requests whose grammar is being compiled.",
              lambda: nan if (n := get_load().compiling) is None else n)  # fmt: skip
        add_gauge("num_requests_inflight", "Requests that were accepted and are not yet answered.",
              lambda: get_load().inflight or 0)  # fmt: skip
        states = Gauge(
            METRIC_PREFIX + "state",
            "1 for the current state of the engine, 0 for other states.",
            ["model_name", "state"],
            registry=self.registry,
        )
        for one in EngineState:
            states.labels(model, str(one)).set_function(
                lambda one=one: float(get_state() is one)  # type: ignore[misc]
            )
