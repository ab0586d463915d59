"""Metrics of the ledger, the KV cache usage and the injected faults.

If no worker has reported a value in this epoch, its series is absent, not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.admin import LedgerEntry, Load

METRIC_PREFIX = "plimsoll_engine_"


class MemoryMetrics(Collector):
    """Collector of memory metrics, which reads their values at each scrape."""

    def __init__(
        self,
        model: str,
        list_injections: Callable[[], list[str]],
        list_ledger_entries: Callable[[], list[LedgerEntry]],
        compute_kv_usage: Callable[[], float | None],
    ) -> None:
        self._model, self._injections = model, list_injections
        self._ledger, self._kv_usage = list_ledger_entries, compute_kv_usage

    def collect(self) -> Iterable[Metric]:
        """Yield the injected faults, the ledger in bytes, and the KV cache usage."""
        faults = InfoMetricFamily(
            METRIC_PREFIX + "injections",
            "Faults that are injected into the engine for a test.",
            labels=["name"],
        )
        for name in self._injections():
            faults.add_metric([name], {})
        yield faults
        yield from self._collect_owners()
        usage = GaugeMetricFamily(
            METRIC_PREFIX + "kv_cache_usage_perc",
            "KV cache usage by requests, 0 to 1 (1 means that all blocks are in use).",
            labels=["model_name"],
        )
        if (share := self._kv_usage()) is not None:
            usage.add_metric([self._model], share)
        yield usage

    def _collect_owners(self) -> Iterable[Metric]:
        labels = ["model_name", "owner", "kind", "process"]
        size = GaugeMetricFamily(
            METRIC_PREFIX + "ledger_bytes",
            "Memory that an owner reports to hold, in bytes.",
            labels=labels,
        )
        bound = GaugeMetricFamily(
            METRIC_PREFIX + "ledger_bound_bytes",
            "Maximum memory that an owner may hold, in bytes.",
            labels=labels,
        )
        for entry in self._ledger():
            values = [self._model, entry.owner, entry.kind.value, entry.process.value]
            size.add_metric(values, entry.bytes)
            if entry.bound is not None:
                bound.add_metric(values, entry.bound)
        yield size
        yield bound


class PickerMetrics(Collector):
    """Collector of the metrics that endpoint pickers read by default, under vLLM's names.

    The source of these names is ``NewOptions`` in ``pkg/epp/server/options.go`` of the Gateway API
    Inference Extension, v1.5.0.
    """

    def __init__(
        self,
        model: str,
        get_load: Callable[[], Load],
        compute_kv_usage: Callable[[], float | None],
        get_kv_pool_size: Callable[[], tuple[int, int] | None],  # tokens in a block, blocks
        list_adapters: Callable[[], list[str]],
        max_adapters: int,
    ) -> None:
        self._model, self._load, self._kv_usage = model, get_load, compute_kv_usage
        self._kv_pool, self._adapters, self._max_adapters = (
            get_kv_pool_size,
            list_adapters,
            max_adapters,
        )

    def collect(self) -> Iterable[Metric]:
        """Yield the requests, the KV cache and the adapters. Unknown values are omitted."""
        load = self._load()
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", load.running),
            ("num_requests_waiting", "Requests that wait for the batch.", load.waiting),
            ("kv_cache_usage_perc", "Share of the KV blocks that requests hold.", self._kv_usage()),
        ):
            gauge = GaugeMetricFamily(
                f"vllm:{name}", f"{text} For endpoint pickers.", labels=["model_name"]
            )
            if value is not None:
                gauge.add_metric([self._model], value)
            yield gauge
        yield from self._collect_info()

    def _collect_info(self) -> Iterable[Metric]:
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV pool size, as labels for endpoint pickers: tokens per block, and number of blocks.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        if (pool := self._kv_pool()) is not None:
            cache.add_metric([self._model, *map(str, pool)], 1)
        yield cache
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters, as labels for endpoint pickers: the loaded ones, and their maximum "
            "number.",
            labels=["running_lora_adapters", "waiting_lora_adapters", "max_lora"],
        )
        adapters.add_metric([",".join(self._adapters()), "", str(self._max_adapters)], 1)
        yield adapters
