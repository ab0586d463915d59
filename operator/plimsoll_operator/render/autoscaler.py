"""The HorizontalPodAutoscaler, where a manifest asks for one."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService


def autoscaler(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object; it scales the Deployment, whose replicas are its own from then on."""
    wanted = service.spec.autoscaling
    if wanted is None:
        return []
    target = wanted.target
    if target.metric is not None:
        metric: dict[str, Any] = {
            "type": "Pods",
            "pods": {
                "metric": {"name": target.metric.name},
                "target": {"type": "AverageValue", "averageValue": target.metric.average_value},
            },
        }
    else:
        use = {"type": "Utilization", "averageUtilization": target.cpu_percent}
        metric = {"type": "Resource", "resource": {"name": "cpu", "target": use}}
    name = service.metadata.name
    return [
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": name},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
                "minReplicas": wanted.min_replicas,
                "maxReplicas": wanted.max_replicas,
                "metrics": [metric],
            },
        }
    ]


def first_replicas(service: InferenceService) -> int:
    """How many replicas a new Deployment begins with."""
    scaling = service.spec.autoscaling
    if scaling is None:
        return service.spec.replicas
    return min(max(service.spec.replicas, scaling.min_replicas), scaling.max_replicas)
