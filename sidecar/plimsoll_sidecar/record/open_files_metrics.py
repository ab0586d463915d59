"""Open file descriptors of the engine, as metrics. Unknown is absent."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.trace import OpenFiles


class OpenFilesMetrics(Collector):
    """Show ``newest``, the reading of the newest sample."""

    def __init__(self) -> None:
        self.newest: OpenFiles | None = None

    def collect(self) -> Iterable[Metric]:
        count = GaugeMetricFamily(
            "plimsoll_engine_open_fds",
            "Open file descriptors of the engine's process that is nearest to its limit.",
        )
        limit = GaugeMetricFamily(
            "plimsoll_engine_max_fds", "Limit of open file descriptors of that process."
        )
        if self.newest is not None:
            count.add_metric([], self.newest.open)
            limit.add_metric([], self.newest.limit)
        return count, limit
