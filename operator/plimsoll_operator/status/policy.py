"""Build the complete ``status`` of a SupervisionPolicy, to apply to the subresource."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from plimsoll_api.incidents import ENDED_PHASES
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision_policy_status import (
    MAX_REFUSED_PODS,
    MAX_SHOWN_WORKLOADS,
    MAX_STATUS_REASON_CHARS,
    InjectionStop,
    PolicyCondition,
)
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.fleet.pods import Cause, Events
from plimsoll_operator.fleet.revisions import (
    describe_same_leak,
    find_suspect_workloads,
    group_incidents_by_workload,
    make_workload_evidence,
)
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.supervisor_metrics import (
    SupervisorMetrics,
    compute_rounded_percent,
    find_blind_pods,
    list_drained_pods,
)
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.fleet.verdict import make_verdicts
from plimsoll_operator.fleet.workloads import (
    Workload,
    group_pods_by_workload,
    index_workload_statuses,
)
from plimsoll_operator.kinds import Object
from plimsoll_operator.plans.injection import RETRY_ANNOTATION, describe_stop
from plimsoll_operator.plans.policy import format_workload_name, join_names
from plimsoll_operator.plans.rolling_restart import SUSPECT_REVISION_MESSAGE, explain_manual_restart
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.status.conditions import (
    MAX_MESSAGE_CHARS,
    NO_SUSPECT_REASON,
    SAME_LEAK_REASON,
    ConditionState,
    make_leak_free_condition,
    make_metric_conditions,
)
from plimsoll_operator.status.recommendation import make_recommendation
from plimsoll_operator.status.service import make_metric_fields, merge_conditions


def make_status(
    item: Object,
    pods: Sequence[SelectedPod] | None,
    incidents: Sequence[Object],
    metrics: Mapping[str, SupervisorMetrics] | None,
    failure: Failure | None,
    now: str,
    wait_reasons: Mapping[WorkloadRef | None, str] | None = None,
    events: Events = MappingProxyType({}),
    injection: Object | None = None,
    memory: MemoryPolicy | None = None,
    latest: Mapping[str, SupervisorMetrics] = MappingProxyType({}),
) -> Object:
    """Return the new status of ``item``.

    ``pods`` is None if they could not be read; the previous values then stay. ``metrics`` is None
    before the first scrape, and ``latest`` are the values from the last scrape. ``wait_reasons``
    says why the pods of each workload still wait for a supervisor. ``memory`` is None if the spec
    is invalid. ``now`` is RFC 3339.
    """
    previous: Object = item.get("status") or {}
    generation = item["metadata"].get("generation", 0)
    counted = (
        *("selected", "supervised", "waitingForRestart", "refused", "refusals"),
        *("workloadCount", "workloads", "injection"),
    )
    after: Object = {"observedGeneration": generation}
    blind_pods = find_blind_pods(metrics or {})
    if pods is None:
        after |= {key: previous[key] for key in counted if key in previous}
        after |= {"openIncidents": previous.get("openIncidents", 0)}
    else:

        def recommend(workload: Workload, last: Object | None) -> Object | None:
            if memory is None:
                return last
            return _make_recommendation(last, workload, memory, latest, now)

        open_incidents = _count_open_incidents(pods, incidents)
        after |= _count_pods(pods, blind_pods) | {"openIncidents": open_incidents.total()}
        after |= _make_workload_statuses(
            previous,
            pods,
            incidents,
            open_incidents,
            metrics,
            wait_reasons or {},
            blind_pods,
            recommend,
            lambda workload, own, last: (
                last.get("verdicts") or []
                if memory is None
                else make_verdicts(make_workload_evidence(workload), own, latest, memory, last)
            ),
        )
    blocked_pods = _find_blocked_pods(pods or (), events, now)
    if injection is not None and pods is not None:
        after["injection"] = injection
    out = list_drained_pods(metrics or {})
    states = [
        _make_ready_condition(after, failure, wait_reasons or {}, blocked_pods, out, blind_pods)
    ]
    states += _make_progress_conditions(failure)
    if pods is not None:
        states += [
            _make_conflicting_condition(pods),
            _make_suspect_revision_condition(after["workloads"]),
        ]
        states.append(
            make_leak_free_condition(
                PolicyCondition.LEAK_FREE, _list_newest_verdicts(after["workloads"])
            )
        )
        if injection is not None:
            states.append(_make_injection_condition(injection, pods))
    elif not previous.get("conditions"):
        text = "a policy with an invalid spec selects no pods"
        states += [
            ConditionState(kind, None, "InvalidSpec", text)
            for kind in (
                PolicyCondition.CONFLICTING,
                PolicyCondition.SUSPECT_REVISION,
                PolicyCondition.LEAK_FREE,
            )
        ]
    if metrics is not None or "conditions" not in previous:
        states += make_metric_conditions(metrics or {}, previous, PolicyCondition)
    after["conditions"] = merge_conditions(previous, states, generation, now)
    return after | make_metric_fields(previous, metrics)


# A pod counts as supervised if its supervisor observes the engine.
def _count_pods(pods: Sequence[SelectedPod], blind_pods: Mapping[str, str]) -> Object:
    active = [one for one in pods if one.state is not SupervisionState.LEAVING]
    refused = sorted(
        (one for one in active if one.state is SupervisionState.REFUSED), key=lambda one: one.name
    )
    counts: Object = {
        "selected": len(active),
        "supervised": sum(
            one.state is SupervisionState.SUPERVISED and one.name not in blind_pods
            for one in active
        ),
        "waitingForRestart": sum(one.state is SupervisionState.WAITING for one in active),
        "refused": len(refused),
    }
    if refused:
        shown = refused[:MAX_REFUSED_PODS]
        counts["refusals"] = [{"pod": one.name, "reason": one.reason} for one in shown]
    return counts


# Anyone with a pod's ServiceAccount may write incidents for the policy, so only supervised pods
# count.
def _count_open_incidents(pods: Sequence[SelectedPod], incidents: Sequence[Object]) -> Counter[str]:
    supervised = {one.name for one in pods if one.state is SupervisionState.SUPERVISED}
    return Counter(
        pod
        for one in incidents
        if (pod := one["spec"]["pod"]) in supervised
        and (one.get("status") or {}).get("phase") not in ENDED_PHASES
    )


def _make_workload_statuses(
    previous: Object,
    pods: Sequence[SelectedPod],
    incidents: Sequence[Object],
    open_incidents: Counter[str],
    metrics: Mapping[str, SupervisorMetrics] | None,
    wait_reasons: Mapping[WorkloadRef | None, str],
    blind_pods: Mapping[str, str],
    recommend: Callable[[Workload, Object | None], Object | None],
    judge: Callable[[Workload, Sequence[Object], Object], list[Object]],
) -> Object:
    """Return ``workloadCount``, and ``workloads`` with only the most important workloads."""
    active = [one for one in pods if one.state is not SupervisionState.LEAVING]
    known = index_workload_statuses(previous)
    workloads = group_pods_by_workload(active)
    suspected = find_suspect_workloads(group_pods_by_workload(pods), incidents, known)
    owned = group_incidents_by_workload(workloads, incidents)
    entries = []
    for one in workloads:
        shown: Object = _make_workload_fields(one.ref) | {
            "selected": len(one.pods),
            "supervised": sum(
                pod.state is SupervisionState.SUPERVISED and pod.name not in blind_pods
                for pod in one.pods
            ),
            "waitingForRestart": one.count_pods(SupervisionState.WAITING),
            "openIncidents": sum(open_incidents[pod.name] for pod in one.pods),
        }
        engines = [
            pod.engine
            for pod in one.pods
            if pod.state is SupervisionState.SUPERVISED and pod.engine
        ]
        shown |= {"engine": engines[-1]} if engines else {}
        roles = sorted({pod.role for pod in one.pods if pod.role is not None})
        shown |= {"roles": [role.value for role in roles]} if roles else {}
        earlier = known.get(str(one.ref or "Pod/")) or {}
        consumed_percent = _compute_consumed_percent(one, metrics, earlier)
        shown |= {} if consumed_percent is None else {"consumedPercent": consumed_percent}
        said = recommend(one, earlier.get("recommendation"))
        shown |= {} if said is None else {"recommendation": said}
        if one.ref is not None and (judged := judge(one, owned.get(one.ref, ()), earlier)):
            shown["verdicts"] = judged
        text = wait_reasons.get(one.ref, "")
        shown |= {"message": make_printable_line(text, MAX_STATUS_REASON_CHARS)} if text else {}
        if one.ref in suspected:
            action = {"action": "Held"} if text == SUSPECT_REVISION_MESSAGE else {}
            shown["suspectRevision"] = suspected[one.ref] | action
        entries.append(shown)
    entries.sort(
        key=lambda one: (
            "suspectRevision" not in one,
            -one.get("consumedPercent", -1),
            -one["openIncidents"],
            "message" not in one,
            one["kind"],
            one.get("name", ""),
        )
    )
    return {"workloadCount": len(entries), "workloads": entries[:MAX_SHOWN_WORKLOADS]}


def _make_recommendation(
    previous: Object | None,
    workload: Workload,
    memory: MemoryPolicy,
    latest: Mapping[str, SupervisorMetrics],
    now: str,
) -> Object | None:
    supervised = [one for one in workload.pods if one.state is SupervisionState.SUPERVISED]
    newest = max(supervised, key=lambda one: one.created, default=None)
    if newest is None:
        return previous
    revision = newest.member.revision
    same = [one.name for one in supervised if one.member.revision == revision]
    metrics = [latest[name] for name in same if name in latest]
    return make_recommendation(previous, revision, metrics, memory, newest.memory_request, now)


# The texts are made printable and truncated, because the creator of a pod can set any text.
def _make_workload_fields(ref: WorkloadRef | None) -> Object:
    if ref is None:
        return {"kind": "Pod"}
    group = {"apiGroup": make_printable_line(ref.api_group, 253)} if ref.api_group else {}
    return group | {
        "kind": make_printable_line(ref.kind, 63),
        "name": make_printable_line(ref.name, 253),
    }


def _compute_consumed_percent(
    workload: Workload, metrics: Mapping[str, SupervisorMetrics] | None, previous: Object
) -> int | None:
    """Return the largest consumed share of a budget in the workload, in percent, or None."""
    if metrics is None:
        return previous.get("consumedPercent")
    found = [metrics[one.name] for one in workload.pods if one.name in metrics]
    known = [ratio for one in found for ratio in (one.host, one.device) if ratio is not None]
    return compute_rounded_percent(max(known)) if known else None


def _make_suspect_revision_condition(workloads: Sequence[Object]) -> ConditionState:
    kind = PolicyCondition.SUSPECT_REVISION
    parts = []
    for one in workloads:
        if found := one.get("suspectRevision"):
            text = describe_same_leak(
                found["leak"], found["leakingReplicas"], found["replicas"], found["revision"],
                found["since"],
            )  # fmt: skip
            parts.append(f"{one['kind']}/{one['name']}: {text}")
    if not parts:
        return ConditionState(kind, False, NO_SUSPECT_REASON)
    return ConditionState(kind, True, SAME_LEAK_REASON, "; ".join(parts)[:MAX_MESSAGE_CHARS])


def _list_newest_verdicts(workloads: Sequence[Object]) -> list[tuple[str, Object]]:
    return [
        (f"{one['kind']}/{one['name']} ", one["verdicts"][0])
        for one in workloads
        if one.get("verdicts")
    ]


def _make_ready_condition(
    counts: Object,
    failure: Failure | None,
    wait_reasons: Mapping[WorkloadRef | None, str],
    blocked_pods: Sequence[tuple[str, Cause]],
    drained: Sequence[str],
    blind_pods: Mapping[str, str],
) -> ConditionState:
    kind = PolicyCondition.READY
    if failure is not None:
        return ConditionState(kind, False, failure.reason, failure.message[:MAX_MESSAGE_CHARS])
    if not counts["selected"]:
        stopped = (counts.get("injection") or {}).get("stopped") or {}
        if stopped.get("refusal"):
            text = f"the API server rejected pods of {stopped['pod']}: {stopped['reason']}"
            return ConditionState(kind, False, "PodsRefused", text[:MAX_MESSAGE_CHARS])
        return ConditionState(kind, True, "NoPods", "no pods match the selector")
    text = f"{counts['supervised']} of {counts['selected']} selected pods are supervised"
    if counts["waitingForRestart"]:
        text += f"; {counts['waitingForRestart']} get a supervisor when they are recreated"
        yours = [
            format_workload_name(ref)
            for ref, why in wait_reasons.items()
            if why == explain_manual_restart(ref)
        ]
        text += (
            f"; restart these workloads yourself to recreate their pods: {join_names(yours)}"
            if yours
            else ""
        )
    if counts["refused"]:
        text += f"; {counts['refused']} were refused (see status.refusals)"
    text += f"; these pods were drained by a person: {join_names(drained)}" if drained else ""
    if blind_pods:
        pods = join_names(list(blind_pods))
        text += (
            f"; these supervisors cannot observe their engines: {pods} (to see why, run plimsoll"
            " doctor)"
        )
    if blocked_pods:
        pod, first = blocked_pods[0]
        more = f" (and {len(blocked_pods) - 1} more)" if len(blocked_pods) > 1 else ""
        text = f"{text}; pod {pod}{more}: {first.message}"[:MAX_MESSAGE_CHARS]
    unseen = next(iter(blind_pods.values()), "")
    if not counts["supervised"]:
        return ConditionState(kind, False, unseen or "NoPodSupervised", text)
    if blocked_pods and len(blocked_pods) == counts["supervised"]:
        return ConditionState(kind, False, blocked_pods[0][1].reason, text)
    complete = counts["supervised"] == counts["selected"]
    if unseen:
        return ConditionState(kind, True, unseen, text)
    return ConditionState(kind, True, "Supervised" if complete else "PartlySupervised", text)


# A retry may help while ``Reconciling`` is True, but not while ``Stalled`` is True.
def _make_progress_conditions(failure: Failure | None) -> list[ConditionState]:
    trying = failure is not None and not failure.is_lasting
    return [
        ConditionState(
            kind,
            true,
            failure.reason if failure and true else "AsExpected",
            failure.message[:MAX_MESSAGE_CHARS] if failure and true else "",
        )
        for kind, true in (
            (PolicyCondition.RECONCILING, trying),
            (PolicyCondition.STALLED, failure is not None and failure.is_lasting),
        )
    ]


def _find_blocked_pods(
    pods: Sequence[SelectedPod], events: Events, now: str
) -> list[tuple[str, Cause]]:
    """Return supervised pods that cannot become ready without a person, each with its cause."""
    return [
        (one.name, why)
        for one in sorted(pods, key=lambda one: one.name)
        if one.view and (why := one.view.find_blocking_cause(events.get(one.name, ()), now))
    ]


def _make_injection_condition(injection: Object, pods: Sequence[SelectedPod]) -> ConditionState:
    kind = PolicyCondition.INJECTION_STOPPED
    if stopped := injection.get("stopped"):
        stop = InjectionStop.model_validate(stopped)
        text = (
            f"new pods get no supervisor, because {describe_stop(stop)}: {stop.reason}; fix the"
            f" cause, and then set the annotation {RETRY_ANNOTATION} to a new value"
        )
        reason = "PodsRefused" if stop.refusal else "PodsDoNotStart"
        return ConditionState(kind, True, reason, text[:MAX_MESSAGE_CHARS])
    stuck = sorted((one.name, one.start.stuck) for one in pods if one.start.stuck)
    if stuck:
        name, reason = stuck[0]
        text = f"pod {name} cannot start: {reason}"
        return ConditionState(kind, False, "PodDoesNotStart", text[:MAX_MESSAGE_CHARS])
    if not injection["proven"]:
        text = (
            f"no pod has run with {injection['images']} yet, so only a few pods at a time get a"
            " supervisor"
        )
        return ConditionState(kind, False, "Unproven", text[:MAX_MESSAGE_CHARS])
    return ConditionState(kind, False, "PodsStart", "pods with a supervisor have started")


def _make_conflicting_condition(pods: Sequence[SelectedPod]) -> ConditionState:
    kind = PolicyCondition.CONFLICTING
    shared = [
        one for one in pods if one.other_policies and one.state is not SupervisionState.LEAVING
    ]
    if not shared:
        return ConditionState(
            kind, False, "NoConflict", "no other policy selects the pods of this policy"
        )
    parts = []
    for mine, word in ((True, "this policy is older and supervises"), (False, "")):
        some = sorted(
            (one for one in shared if one.is_oldest_policy is mine), key=lambda one: one.name
        )
        if not some:
            continue
        policies = sorted({name for one in some for name in one.other_policies})
        text = f"{join_names(policies)} also selects {join_names([one.name for one in some])}: "
        parts.append(text + (f"{word} them" if mine else "the oldest policy supervises them"))
    return ConditionState(kind, True, "PodsSelectedTwice", "; ".join(parts)[:MAX_MESSAGE_CHARS])
