"""Metrics of what the engine holds: its ledger, the fill of its KV pool, faults switched on.

Owners are named by the engine's own code, so that their number is bounded. What a worker has not
reported in this epoch is an absent series, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.admin import LedgerEntry

PREFIX = "plimsoll_engine_"


class Holdings(Collector):
    """Its callables are asked at each scrape."""

    def __init__(
        self,
        model: str,
        injections: Callable[[], list[str]],
        ledger: Callable[[], list[LedgerEntry]],
        kv_usage: Callable[[], float | None],
    ) -> None:
        self._model, self._injections = model, injections
        self._ledger, self._kv_usage = ledger, kv_usage

    def collect(self) -> Iterable[Metric]:
        """Yield the ledger's entries in bytes with their bounds, and the faults switched on."""
        faults = InfoMetricFamily(
            PREFIX + "injections", "Faults that were switched on for a test.", labels=["name"]
        )
        for name in self._injections():
            faults.add_metric([name], {})
        yield faults
        yield from self._owners()
        usage = GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc",
            "Share of the KV blocks that requests hold (1 is all of them).",
            labels=["model_name"],
        )
        if (share := self._kv_usage()) is not None:
            usage.add_metric([self._model], share)
        yield usage

    def _owners(self) -> Iterable[Metric]:
        labels = ["model_name", "owner", "kind", "process"]
        held = GaugeMetricFamily(
            PREFIX + "ledger_bytes", "Memory that an owner says it holds.", labels=labels
        )
        bound = GaugeMetricFamily(
            PREFIX + "ledger_bound_bytes", "The most that an owner will ever hold.", labels=labels
        )
        for entry in self._ledger():
            values = [self._model, entry.owner, entry.kind.value, entry.process.value]
            held.add_metric(values, entry.bytes)
            if entry.bound is not None:
                bound.add_metric(values, entry.bound)
        yield held
        yield bound
