"""The NetworkPolicy, where a manifest asks for one."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.render import names, paths


def network_policy(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object: the serving port for clients, the metrics ports for monitoring.

    The admin port listens on loopback alone and is let in for nobody. The kubelet's probes come
    from the node, which no policy holds back.
    """
    wanted = service.spec.network_policy
    if not wanted.enabled:
        return []
    port = service.spec.engine.port
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
                    _from(wanted.monitoring, port, paths.METRICS_PORT),
                ],
            },
        }
    ]


def _from(peers: list[dict[str, Any]], *ports: int) -> dict[str, Any]:
    """Without peers everybody."""
    rule: dict[str, Any] = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    return rule | ({"from": peers} if peers else {})
