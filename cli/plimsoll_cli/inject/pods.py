"""Where each kind keeps its pod spec, and the pod's labels."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
TEMPLATED = {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController"}


def pod_of(document: Object) -> tuple[Object, Object] | None:
    """Pod spec and labels, both to be changed in place; None where the kind has no pod."""
    kind = document.get("kind")
    if kind == "Pod":
        return document.setdefault("spec", {}), _labels(document.setdefault("metadata", {}))
    if kind in TEMPLATED:
        template = document.setdefault("spec", {}).setdefault("template", {})
        labels = _labels(template.setdefault("metadata", {}))
        return template.setdefault("spec", {}), labels
    if kind == "InferenceService" and str(document.get("apiVersion", "")).startswith(
        "serving.kserve.io/"
    ):
        # KServe merges the fields of a pod spec that stand in the predictor.
        predictor = document.setdefault("spec", {}).setdefault("predictor", {})
        return predictor, _labels(predictor)
    return None


def containers_of(pod: Object) -> list[Object]:
    """The pod's containers; for a KServe predictor with a model also the one that its runtime
    makes, which a container of that name in the predictor is merged with."""
    listed: list[Object] = pod.get("containers") or []
    model = pod.get("model")
    if isinstance(model, dict) and not any(one.get("name") == "kserve-container" for one in listed):
        runtime = model.get("runtime") or (model.get("modelFormat") or {}).get("name", "")
        made = {"name": "kserve-container", "image": str(runtime), **model}
        return [*listed, made]
    return listed


def _labels(metadata: Object) -> Object:
    if metadata.get("labels") is None:
        metadata["labels"] = {}
    labels: Object = metadata["labels"]
    return labels
