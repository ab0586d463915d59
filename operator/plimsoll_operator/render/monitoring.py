"""PodMonitor and PrometheusRule, where a manifest asks for them."""

from __future__ import annotations

import re
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import SERVICE_LABEL
from plimsoll_operator.render import names
from plimsoll_operator.render.burn import FAST, SLOW, burn

GROUP = "monitoring.coreos.com"


def pod_monitor(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object: engine and supervisor are scraped by the names of their ports."""
    wanted = service.spec.observability.pod_monitor
    if not wanted.enabled:
        return []
    # Which service a series belongs to is what alerts and dashboards ask first.
    label = f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', SERVICE_LABEL)}"
    endpoint = {
        "path": "/metrics",
        "interval": wanted.interval,
        "relabelings": [{"sourceLabels": [label], "targetLabel": "service"}],
    }
    return [
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "PodMonitor",
            "metadata": {"name": service.metadata.name, "labels": dict(wanted.labels)},
            "spec": {
                "selector": {"matchLabels": names.selector(service.metadata.name)},
                "podMetricsEndpoints": [
                    {"port": "http"} | endpoint,
                    {"port": "metrics"} | endpoint,
                ],
            },
        }
    ]


def prometheus_rule(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object: alerts on this service's own budgets, by the ranges of their windows.

    All other alerts need nothing of a service and are the cluster's (``dashboards/alerts.yaml``).
    """
    wanted = service.spec.observability.prometheus_rule
    if not wanted.enabled:
        return []
    meta, memory = service.metadata, service.spec.memory
    rules = [
        burn(rule, round(budget.window_s), _matchers(service, kind))
        for kind, budget in (("host", memory.host), ("device", memory.device))
        if budget is not None
        for rule in (FAST, SLOW)
    ]
    return [
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": meta.name, "labels": dict(wanted.labels)},
            "spec": {"groups": [{"name": f"{meta.namespace}/{meta.name}", "rules": rules}]},
        }
    ]


def _matchers(service: InferenceService, kind: str) -> str:
    meta = service.metadata
    return f'{{namespace="{meta.namespace}",service="{meta.name}",kind="{kind}"}}'
