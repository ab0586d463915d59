"""Metrics of the HTTP servers' connections: how many there are, and which the server ended."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_engine.frontend.observability.ledger_metrics import PREFIX
from plimsoll_engine.http.connections import Connections


class HttpConnections(Collector):
    """Of the servers in ``servers``, by name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.servers: dict[str, Connections] = {}
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        opened = GaugeMetricFamily(
            PREFIX + "http_connections", "Connections that are open.", labels=["server"]
        )
        bound = GaugeMetricFamily(
            PREFIX + "http_connections_limit", "The most connections.", labels=["server"]
        )
        closed = CounterMetricFamily(
            PREFIX + "http_connections_closed",
            "Connections that the server ended: header_timeout, write_timeout and linger_timeout"
            " (the client was too slow), pipelined, evicted (it waited longest when there were too"
            " many), refused (503: all were at work).",
            labels=["server", "reason"],
        )
        for name, server in self.servers.items():
            opened.add_metric([name], len(server))
            bound.add_metric([name], server.limits.max_connections)
            for reason, count in server.closed.items():
                closed.add_metric([name, reason], count)
        yield opened
        yield bound
        yield closed
