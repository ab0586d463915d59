"""Build the complete ``status`` of an InferenceService, to apply to the subresource."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from plimsoll_api.incidents import ENDED_PHASES
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.inferenceservice_status import ConditionType
from plimsoll_api.names import POD_HASH_ANNOTATION, SERVICE_LABEL
from plimsoll_api.units import parse_bytes
from plimsoll_operator.fleet.leftover_workers import find_leftover_workers
from plimsoll_operator.fleet.pods import Events, PodView
from plimsoll_operator.fleet.revisions import (
    make_replica_pods,
    make_revisions_status,
    make_suspect_status,
)
from plimsoll_operator.fleet.supervisor_metrics import (
    SupervisorMetrics,
    count_drained,
    list_drained_pods,
    make_memory_status,
)
from plimsoll_operator.fleet.verdict import make_verdicts
from plimsoll_operator.kinds import Object
from plimsoll_operator.plans.service import Failure, Plan
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.render.names import make_serving_selector
from plimsoll_operator.render.objects import compute_initial_replicas, make_service_url
from plimsoll_operator.status import conditions
from plimsoll_operator.status.conditions import ConditionState
from plimsoll_operator.status.objects_complete import make_objects_complete_conditions
from plimsoll_operator.status.recommendation import make_recommendation

RESTART_STEP_NAMES = frozenset({"WorkerRestart", "EngineRestart"})
RETIRED_CONDITION_TYPES = frozenset({"OutOfMemoryKilled"})


def make_status(
    item: Object,
    service: InferenceService | None,
    workload: Object | None,
    pods: Sequence[PodView],
    incidents: list[Object],
    metrics: Mapping[str, SupervisorMetrics] | None,
    failure: Failure | None,
    now: str,
    missing_kinds: Sequence[str] = (),
    plan: Plan | None = None,
    events: Events = MappingProxyType({}),
    latest: Mapping[str, SupervisorMetrics] = MappingProxyType({}),
    scaled_object: Object | None = None,
) -> Object:
    """Return the new status of ``item``.

    ``service`` is None if the spec is invalid, and ``plan`` if planning failed. ``workload`` is the
    object that creates the pods. ``metrics`` is None before the first scrape; the previous memory
    values then stay. ``latest`` are the values from the last scrape. ``missing_kinds`` are kinds
    that the cluster does not serve. ``now`` is RFC 3339.
    """
    previous: Object = item.get("status") or {}
    generation = item["metadata"].get("generation", 0)
    states: list[ConditionState] = conditions.make_container_conditions(
        pods, events, now
    ) + conditions.make_termination_conditions(pods, now)
    if failure is None and service is not None:
        blocker = states[0]
        if leftover := find_leftover_workers(pods, now):
            blocker = ConditionState(blocker.type, False, leftover.reason, leftover.message)
        states += conditions.make_rollout_conditions(
            workload,
            _get_desired_replicas(service, workload),
            service.spec.supervision.max_unavailable,
            blocker,
            list_drained_pods(metrics or {}),
        )
        states += make_objects_complete_conditions(
            service, missing_kinds, plan.dropped_fields if plan else (), scaled_object
        )
    if plan is not None:
        complete = any(one.reason == "RolloutComplete" for one in states)
        states += conditions.make_suspect_revision_conditions(plan.suspect, plan.decision)
        states += conditions.make_last_good_conditions(plan.decision, complete)
    if failure is not None:
        states += conditions.make_failure_conditions(failure)
    if metrics is not None or "conditions" not in previous:
        # Set it to Unknown at first: adding the condition later would cost a write.
        states += conditions.make_budget_conditions(metrics or {})
        states += conditions.make_metric_conditions(metrics or {}, previous, ConditionType)
    judged = previous.get("verdicts") or []
    if service is not None:
        found = [(pod.created, one) for pod, one in zip(pods, make_replica_pods(pods), strict=True)]
        judged = make_verdicts(found, incidents, latest, service.spec.memory, previous)
    states.append(
        conditions.make_leak_free_condition(
            ConditionType.LEAK_FREE, [("", one) for one in judged[:1]]
        )
    )
    states.append(conditions.make_reconciling_condition(states))
    seen = (workload or {}).get("status") or {}
    after: Object = {
        "observedGeneration": generation,
        "replicas": seen.get("replicas", 0),
        "readyReplicas": seen.get("readyReplicas", 0),
        "desiredReplicas": previous.get("desiredReplicas", 0)
        if service is None
        else _get_desired_replicas(service, workload),
        "selector": _make_selector(item, service),
        "conditions": merge_conditions(previous, states, generation, now),
        **_summarize_incidents(incidents),
    }
    after |= {"verdicts": judged} if judged else {}
    after |= _make_revision_fields(previous, workload, states, plan, service)
    if service is not None:
        after["url"] = make_service_url(service)
    elif "url" in previous:
        after["url"] = previous["url"]
    said = previous.get("recommendation")
    if service is not None and (newest := max(pods, key=lambda one: one.created, default=None)):
        seen_pods = [one.name for one in pods if one.revision == newest.revision]
        request = service.spec.engine.resources.requests.get("memory")
        said = make_recommendation(
            said,
            newest.revision,
            [latest[name] for name in seen_pods if name in latest],
            service.spec.memory,
            parse_bytes(request) if request is not None else None,
            now,
        )
    return (
        after | make_metric_fields(previous, metrics) | ({"recommendation": said} if said else {})
    )


# Only one pod per replica counts.
def _make_selector(item: Object, service: InferenceService | None) -> str:
    labels = (
        {SERVICE_LABEL: item["metadata"]["name"]}
        if service is None
        else make_serving_selector(service)
    )
    return ",".join(f"{key}={value}" for key, value in labels.items())


def make_metric_fields(previous: Object, metrics: Mapping[str, SupervisorMetrics] | None) -> Object:
    """Return ``memory`` and ``drained`` from the supervisors' values, or the previous fields."""
    if metrics is None:
        return {key: previous[key] for key in ("memory", "drained") if key in previous}
    found: Object = {"memory": make_memory_status(metrics), "drained": count_drained(metrics)}
    return {key: value for key, value in found.items() if value not in (None, {})}


# Without a plan, the previous values stay.
def _make_revision_fields(
    previous: Object,
    workload: Object | None,
    states: list[ConditionState],
    plan: Plan | None,
    service: InferenceService | None,
) -> Object:
    if plan is None or service is None:
        kept = ("revisions", "suspectRevision")
        return {key: previous[key] for key in kept if key in previous}
    update = compute_pod_hash(service)
    annotations = ((workload or {}).get("metadata") or {}).get("annotations") or {}
    # Without a replica, a rollout is complete but proves nothing.
    proven = _get_desired_replicas(service, workload) and any(
        one.reason == "RolloutComplete" for one in states
    )
    done = str(annotations.get(POD_HASH_ANNOTATION, "")) if proven else ""
    bad = "" if plan.decision.action == "None" else update
    found: Object = {
        "revisions": make_revisions_status(previous.get("revisions") or {}, update, done, bad)
    }
    suspect = make_suspect_status(
        plan.suspect, previous, update, plan.decision.action, plan.changed
    )
    return found | ({"suspectRevision": suspect} if suspect else {})


def _get_desired_replicas(service: InferenceService, workload: Object | None) -> int:
    if service.spec.autoscaling is None:
        return service.spec.replicas
    spec = (workload or {}).get("spec") or {}
    return int(spec.get("replicas", compute_initial_replicas(service)))


def merge_conditions(
    previous: Object, states: Sequence[ConditionState], generation: int, now: str
) -> list[dict[str, Any]]:
    """Merge ``states`` into the previous conditions, and set ``lastTransitionTime``.

    A condition without a new state stays unchanged. Of two states, the later counts.
    """
    known: dict[str, Any] = {
        one["type"]: one
        for one in previous.get("conditions") or ()
        if one["type"] not in RETIRED_CONDITION_TYPES
    }
    for state in {one.type: one for one in states}.values():
        word = {True: "True", False: "False", None: "Unknown"}[state.status]
        old = known.get(state.type)
        same = old is not None and old["status"] == word
        known[state.type] = {
            "type": state.type.value,
            "status": word,
            "reason": state.reason,
            "message": state.message,
            "lastTransitionTime": old["lastTransitionTime"] if old and same else now,
            "observedGeneration": generation,
        }
    return [known[type_] for type_ in sorted(known)]


def _summarize_incidents(incidents: list[Object]) -> Object:
    phases = [(one.get("status") or {}).get("phase") for one in incidents]
    steps = [step for one in incidents for step in (one.get("status") or {}).get("timeline") or ()]
    newest = max(
        incidents,
        key=lambda one: (one["spec"].get("openedAt") or "", one["metadata"]["name"]),
        default=None,
    )
    found: Object = {
        "restarts": sum(
            step.get("step") in RESTART_STEP_NAMES and step.get("outcome") == "Succeeded"
            for step in steps
        ),
        "openIncidents": sum(phase not in ENDED_PHASES for phase in phases),
    }
    return found | ({"lastIncident": newest["metadata"]["name"]} if newest else {})
