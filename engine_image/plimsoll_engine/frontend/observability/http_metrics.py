"""Metrics of open connections and of those that the server closed."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_engine.frontend.observability.ledger_metrics import METRIC_PREFIX
from plimsoll_engine.http.connections import Connections


class HttpConnections(Collector):
    """Collector of the connection metrics of all servers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._servers: dict[str, Connections] = {}
        registry.register(self)

    def add(self, name: str, connections: Connections) -> None:
        """Export the metrics of ``connections``, with the label ``server`` set to ``name``."""
        self._servers[name] = connections

    def collect(self) -> Iterable[Metric]:
        """Yield the number of open connections, its limit, and the closed connections by reason."""
        opened = GaugeMetricFamily(
            METRIC_PREFIX + "http_connections", "Open connections.", labels=["server"]
        )
        bound = GaugeMetricFamily(
            METRIC_PREFIX + "http_connections_limit",
            "Maximum number of connections.",
            labels=["server"],
        )
        closed = CounterMetricFamily(
            METRIC_PREFIX + "http_connections_closed",
            "Connections that the server closed: header_timeout, write_timeout and linger_timeout"
            " (the client was too slow), pipelined, evicted (idle for longest at the limit),"
            " refused (503: all others were busy).",
            labels=["server", "reason"],
        )
        for name, server in self._servers.items():
            opened.add_metric([name], len(server))
            bound.add_metric([name], server.limits.max_connections)
            for reason, count in server.closed.items():
                closed.add_metric([name, reason], count)
        yield opened
        yield bound
        yield closed
