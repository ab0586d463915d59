"""Build the condition ``ObjectsComplete`` of an InferenceService."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.inferenceservice_status import ConditionType
from plimsoll_operator.kinds import Object
from plimsoll_operator.status.conditions import MAX_MESSAGE_CHARS, ConditionState

MAX_QUOTED_CHARS = 700
PROMETHEUS_HINT = "install the Prometheus operator, or disable it in spec.observability"
GATEWAY_HINT = "install the Gateway API with its Inference Extension, or remove spec.gateway"


def make_objects_complete_conditions(
    service: InferenceService,
    missing_kinds: Sequence[str],
    dropped_fields: Sequence[str] = (),
    scaled_object: Object | None = None,
) -> list[ConditionState]:
    """Return ``ObjectsComplete``: whether the cluster supports all enabled objects and fields.

    ``missing_kinds`` are kinds that the cluster does not serve, and ``dropped_fields`` fields that
    it did not store.
    """
    wanted = service.spec
    enabled = {
        "PodMonitor": (wanted.observability.pod_monitor.enabled, PROMETHEUS_HINT),
        "PrometheusRule": (wanted.observability.prometheus_rule.enabled, PROMETHEUS_HINT),
        "ScaledObject": (
            bool(wanted.autoscaling and wanted.autoscaling.triggers),
            "install KEDA, or set spec.autoscaling.target",
        ),
        "InferencePool": (wanted.gateway is not None, GATEWAY_HINT),
        "HTTPRoute": (wanted.gateway is not None, GATEWAY_HINT),
    }
    lacking = {
        kind: enabled[kind][1] for kind in missing_kinds if kind in enabled and enabled[kind][0]
    }
    if not lacking and dropped_fields:
        text = (
            "the cluster did not store some fields, because it does not know them, the feature is"
            f" disabled, or another webhook removed them: {'; '.join(dropped_fields)}"
        )
        return [
            ConditionState(
                ConditionType.OBJECTS_COMPLETE, False, "FieldsNotKept", text[:MAX_MESSAGE_CHARS]
            )
        ]
    if not lacking:
        problem = _find_scaling_error(scaled_object or {}) if enabled["ScaledObject"][0] else ""
        if problem:
            return [
                ConditionState(
                    ConditionType.OBJECTS_COMPLETE, False, "ScaledObjectNotReady", problem
                )
            ]
        return [ConditionState(ConditionType.OBJECTS_COMPLETE, True, "AllObjectsCreated")]
    return [
        ConditionState(
            ConditionType.OBJECTS_COMPLETE,
            False,
            "APINotInstalled",
            (
                f"the cluster has no {' and no '.join(lacking)}:"
                f" {'; '.join(dict.fromkeys(lacking.values()))}. The operator checks again at each"
                " resync"
            ),
        )
    ]


def _find_scaling_error(scaled_object: Object) -> str:
    for one in (scaled_object.get("status") or {}).get("conditions") or ():
        if one.get("type") == "Ready" and one.get("status") == "False":
            said = f"{one.get('reason')}: {one.get('message')}"[:MAX_QUOTED_CHARS]
            return (
                f"KEDA reports {said}, so it may not scale the service, not even from zero: see"
                " the Events of the ScaledObject. The operator checks again at each resync"
            )
    return ""
