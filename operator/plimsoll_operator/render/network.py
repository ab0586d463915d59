"""The NetworkPolicy, unless a manifest turns it off."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import METRICS_PORT, PROBE_PORT
from plimsoll_operator.render import names


def network_policy(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object: the serving port for clients, the metrics ports for monitoring.

    The admin port listens on loopback alone and is let in for nobody. The kubelet's probes come
    from the pod's own node, which no policy holds back; the probe port is open to nobody else who
    is not named.
    """
    wanted = service.spec.network_policy
    if not wanted.enabled:
        return []
    port = service.spec.engine.port
    # Engines show their metrics on the serving port: named scrapers may use it, too. Scrapers that
    # nobody named must not open it to those who are no clients.
    scraped = (port, METRICS_PORT) if wanted.monitoring else (METRICS_PORT,)
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": service.metadata.name},
            "spec": {
                "podSelector": {"matchLabels": names.selector(service.metadata.name)},
                "policyTypes": ["Ingress"],
                "ingress": [
                    _from(wanted.clients, port),
                    _from(wanted.monitoring, *scraped),
                    *([_from(wanted.probes, PROBE_PORT)] if wanted.probes else []),
                ],
            },
        }
    ]


def _from(peers: list[dict[str, Any]], *ports: int) -> dict[str, Any]:
    """Without peers everybody."""
    rule: dict[str, Any] = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    return rule | ({"from": peers} if peers else {})
