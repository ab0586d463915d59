"""Build the conditions of an InferenceService, from decisions of :mod:`plimsoll_operator.fleet`.

===========================  ==================================================================
``Ready``                    enough replicas, of any revision, accept requests
``EngineReady``              every replica's engine container is ready
``SupervisorReady``          every replica's supervisor container is ready
``MemoryWithinBudget``       no replica has exhausted a leak budget; Unknown without values
``RestartBudgetExhausted``   a supervisor may restart nothing until a person resets its budget
``Progressing``              a rollout is in progress, or replicas are missing
``Reconciling``              True while Progressing is True, for tools that use kstatus
``Stalled``                  a person must change something before the service can make progress
``OOMKilled``                the last termination of a replica's container was an OOM kill
``CrashLooping``             a replica's container keeps terminating
``SuspectRevision``          most replicas of the current revision have the same leak
``SlowLeak``                 memory of a replica grows without a limit; nothing acts on it
``MemoryNearLimit``          a replica is near its memory limit; nothing acts on it
``EngineObserved``           every supervisor observes its engine's process, memory and metrics
``ObjectsComplete``          every enabled object exists as requested, and KEDA reports no error
``LeakFree``                 the newest revision does not leak; Unknown without enough evidence
===========================  ==================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll_api.assessment import format_slow_leak
from plimsoll_api.inferenceservice_status import ConditionType, Leaks
from plimsoll_api.memory_policy import NEAR_LIMIT_RATIO
from plimsoll_api.supervision_policy_status import PolicyCondition
from plimsoll_operator.fleet.pods import Cause, Events, PodView, find_not_ready_pods
from plimsoll_operator.fleet.revisions import LeakingRevision, RolloutDecision, describe_same_leak
from plimsoll_operator.fleet.supervisor_metrics import (
    SlowLeak,
    SupervisorMetrics,
    find_pods_missing_signals,
    list_pods_near_limit,
)
from plimsoll_operator.kinds import Object
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.render import names

MAX_MESSAGE_CHARS = 1024
MAX_SLOW_LEAKS = 8
NOT_READY_REASON = "ContainersNotReady"
"""Reason of ``EngineReady`` while the engine only needs more time."""
NO_SUSPECT_REASON, SAME_LEAK_REASON = "NoSuspect", "SameLeakInMostReplicas"


@dataclass(frozen=True)
class ConditionState:
    """Condition without its times; a ``status`` of None means Unknown."""

    type: ConditionType | PolicyCondition
    status: bool | None
    reason: str
    message: str = ""


def make_failure_conditions(failure: Failure) -> list[ConditionState]:
    """Return the conditions that change if a spec cannot be applied."""
    message = failure.message[:MAX_MESSAGE_CHARS]
    return [
        ConditionState(ConditionType.READY, False, failure.reason, message),
        ConditionState(ConditionType.PROGRESSING, not failure.is_lasting, failure.reason, message),
        ConditionState(ConditionType.STALLED, failure.is_lasting, failure.reason, message),
    ]


def make_rollout_conditions(
    deployment: Object | None,
    desired: int,
    max_unavailable: int,
    engines: ConditionState | None = None,
    drained: Sequence[str] = (),
) -> list[ConditionState]:
    """Return ``Ready``, ``Progressing`` and ``Stalled`` from the workload's status.

    ``Ready`` stays True during a rollout that keeps all but ``max_unavailable`` replicas ready.
    ``engines`` is the condition ``EngineReady``, whose message explains missing replicas.
    ``drained`` are the pods that a person keeps out of service.
    """
    trouble = engines if engines is not None and engines.status is False else None
    status = (deployment or {}).get("status") or {}
    generation = ((deployment or {}).get("metadata") or {}).get("generation", 0)
    current = bool(deployment) and status.get("observedGeneration", 0) >= generation
    ready, updated = status.get("readyReplicas", 0), status.get("updatedReplicas", 0)
    rolled_out = current and updated == desired == status.get("replicas", 0)
    refused = _find_creation_failure(status)
    count = f"{ready} of {desired} replicas are ready"
    count += f"; {refused.message}" if refused else ""
    count += f"; drained by a person: {', '.join(drained)}" if drained else ""
    count = count[:MAX_MESSAGE_CHARS]
    late = current and any(
        one["type"] == "Progressing" and one.get("reason") == "ProgressDeadlineExceeded"
        for one in status.get("conditions") or ()
    )
    missing = "ReplicasNotReady" if rolled_out else "RollingOut"
    if desired == 0 and rolled_out:
        state = ConditionState(
            ConditionType.READY, True, "ScaledToZero", "the service has been scaled to zero"
        )
    elif ready >= max(1, desired - max_unavailable):
        state = ConditionState(ConditionType.READY, True, "ReplicasReady", count)
    else:
        blocked = trouble.reason if trouble and trouble.reason != NOT_READY_REASON else ""
        reason = refused.reason if refused else blocked
        text = f"{count}; {trouble.message}" if trouble else count
        reason = reason or ("ReplicasDrained" if drained else missing)
        state = ConditionState(ConditionType.READY, False, reason, text[:MAX_MESSAGE_CHARS])
    done = rolled_out and ready == desired
    cause = (
        f"; {trouble.message}"
        if trouble and not done and trouble.reason != NOT_READY_REASON
        else ""
    )
    return [
        state,
        ConditionState(
            ConditionType.PROGRESSING,
            not done and not late,
            "RolloutComplete" if done else "ProgressDeadlineExceeded" if late else missing,
            f"{count}{cause}"[:MAX_MESSAGE_CHARS],
        ),
        ConditionState(
            ConditionType.STALLED,
            late and not done,
            "ProgressDeadlineExceeded" if late and not done else "AsExpected",
            f"{count}; {trouble.message if trouble else 'see the Events of the pods'}"[
                :MAX_MESSAGE_CHARS
            ]
            if late and not done
            else "",
        ),
    ]


def make_reconciling_condition(states: Sequence[ConditionState]) -> ConditionState:
    """Return ``Reconciling``, which has the status of the last ``Progressing`` in ``states``."""
    progressing = [one for one in states if one.type is ConditionType.PROGRESSING]
    if not (progressing and progressing[-1].status):
        return ConditionState(ConditionType.RECONCILING, False, "AsExpected")
    return ConditionState(
        ConditionType.RECONCILING, True, progressing[-1].reason, progressing[-1].message
    )


def _find_creation_failure(status: Object) -> Cause | None:
    """Return why pods cannot be created, such as a quota; None if they can."""
    for one in status.get("conditions") or ():
        if one["type"] == "ReplicaFailure" and one["status"] == "True":
            return Cause(str(one.get("reason") or "FailedCreate"), str(one.get("message", "")))
    return None


def make_container_conditions(
    pods: Sequence[PodView], events: Events, now: str
) -> list[ConditionState]:
    """Return ``EngineReady`` and ``SupervisorReady`` from the containers of the pods."""
    types = (
        (ConditionType.ENGINE_READY, names.ENGINE),
        (ConditionType.SUPERVISOR_READY, names.SUPERVISOR),
    )
    return [
        _make_container_condition(type_, pods, find_not_ready_pods(pods, name, events, now))
        for type_, name in types
    ]


def _make_container_condition(
    type_: ConditionType, pods: Sequence[PodView], causes: list[tuple[str, Cause]]
) -> ConditionState:
    if not pods:
        return ConditionState(type_, None, "NoReplicas", "there are no pods")
    if not causes:
        return ConditionState(type_, True, "ContainersReady", "")
    first = causes[0][1]
    text = "; ".join(f"{pod}: {why.message}" for pod, why in causes)
    reason = first.reason if first.blocking else NOT_READY_REASON
    return ConditionState(type_, False, reason, text[:MAX_MESSAGE_CHARS])


def make_termination_conditions(pods: Sequence[PodView], now: str) -> list[ConditionState]:
    """Return ``OOMKilled`` and ``CrashLooping`` from the containers' last terminations."""
    killed = sorted(pod.name for pod in pods if any(one.was_oom_killed for one in pod.containers))
    looping = sorted(pod.name for pod in pods if any(one.is_looping(now) for one in pod.containers))
    return [
        ConditionState(
            ConditionType.OOM_KILLED,
            bool(killed),
            "OOMKilled" if killed else "NoOOMKill",
            _append_pods("the kernel OOM-killed a container in", killed),
        ),
        ConditionState(
            ConditionType.CRASH_LOOPING,
            bool(looping),
            "CrashLoopBackOff" if looping else "NoCrashLoop",
            _append_pods("containers are in a crash loop in", looping),
        ),
    ]


def make_suspect_revision_conditions(
    suspect: LeakingRevision | None, decision: RolloutDecision
) -> list[ConditionState]:
    """Return ``SuspectRevision``, and ``Stalled`` while a rollout is paused or rolled back."""
    acts = decision.action in ("Held", "RolledBack") and not decision.requested
    if suspect is None and not acts:
        return [ConditionState(ConditionType.SUSPECT_REVISION, False, NO_SUSPECT_REASON)]
    evidence = (
        describe_same_leak(
            suspect.leak, suspect.leaking, suspect.replicas, suspect.revision, suspect.since
        )
        if suspect
        else "the leaking replicas no longer exist"
    )
    states = [ConditionState(ConditionType.SUSPECT_REVISION, True, SAME_LEAK_REASON, evidence)]
    if acts:
        done, remedy = (
            (f"the operator rolled back to revision {decision.revision}", "the spec")
            if decision.action == "RolledBack"
            else ("the rollout is paused", "the spec or rollout.onLeak")
        )
        text = f"{done}, because of a leak: {evidence}; to continue, change {remedy}"
        reason = f"{decision.action}ForLeak"
        states.append(ConditionState(ConditionType.PROGRESSING, False, reason, text))
        states.append(ConditionState(ConditionType.STALLED, True, reason, text))
    return states


def make_last_good_conditions(decision: RolloutDecision, complete: bool) -> list[ConditionState]:
    """Return the conditions for ``spec.rollout.revision: LastGood``; empty for other values.

    ``complete`` is True if all replicas run the requested revision.
    """
    if not decision.requested:
        return []
    if decision.action == "RolledBack":
        text = (
            f"all replicas run revision {decision.revision}, because spec.rollout.revision is"
            " LastGood"
        )
        return (
            [ConditionState(ConditionType.PROGRESSING, False, "RolledBackOnRequest", text)]
            if complete
            else []
        )
    text = (
        "spec.rollout.revision is LastGood, but no earlier revision is known to be good, so the"
        " replicas run the revision of the spec; to continue, set spec.rollout.revision to Spec"
    )
    return [ConditionState(ConditionType.STALLED, True, "NoGoodRevision", text)]


def make_budget_conditions(metrics: Mapping[str, SupervisorMetrics]) -> list[ConditionState]:
    """Return ``MemoryWithinBudget`` and ``RestartBudgetExhausted`` from the supervisors' values."""
    spent = sorted(
        pod for pod, one in metrics.items() if max(one.host or 0.0, one.device or 0.0) >= 1.0
    )
    known = any(one.host is not None or one.device is not None for one in metrics.values())
    exhausted = sorted(pod for pod, one in metrics.items() if one.restarts_left == 0)
    counted = any(one.restarts_left is not None for one in metrics.values())
    return [
        ConditionState(
            ConditionType.MEMORY_WITHIN_BUDGET,
            not spent if known else None,
            ("BudgetExhausted" if spent else "WithinBudget") if known else "NoMetrics",
            _append_pods("a leak budget is exhausted in", spent)
            if known
            else "no supervisor reports its leak budgets",
        ),
        ConditionState(
            ConditionType.RESTART_BUDGET_EXHAUSTED,
            bool(exhausted) if counted else None,
            ("BudgetExhausted" if exhausted else "WithinBudget") if counted else "NoMetrics",
            _append_pods("the restart budget is exhausted in", exhausted) if counted else "",
        ),
    ]


def make_slow_leak_condition(
    type_: ConditionType | PolicyCondition, metrics: Mapping[str, SupervisorMetrics]
) -> ConditionState:
    """Return ``SlowLeak``; its message begins with the replica that has the least time left."""
    evaluated = [pod for pod, one in metrics.items() if one.slow_leaks is not None]
    if not evaluated:
        text = "no supervisor has observed its engine for long enough (about 9 hours)"
        return ConditionState(type_, None, "InsufficientData", text)
    leaks = sorted(
        ((pod, slow) for pod, one in metrics.items() for slow in one.slow_leaks or ()),
        key=lambda found: (_get_remaining_s(found[1]), found[0], found[1].kind),
    )
    if not leaks:
        return ConditionState(
            type_,
            False,
            "NoSlowLeak",
            f"memory growth has been evaluated in {len(evaluated)} of {len(metrics)} pods",
        )
    text = "; ".join(
        f"{pod}: {format_slow_leak(slow.kind, slow.segment, slow.bytes_per_s, slow.limit_s)}"
        for pod, slow in leaks[:MAX_SLOW_LEAKS]
    )
    more = len(leaks) - MAX_SLOW_LEAKS
    text += f"; and {more} more leaks" if more > 0 else ""
    return ConditionState(type_, True, "MemoryKeepsGrowing", text[:MAX_MESSAGE_CHARS])


def make_near_limit_condition(
    type_: ConditionType | PolicyCondition,
    metrics: Mapping[str, SupervisorMetrics],
    was_near_limit: bool,
) -> ConditionState:
    """Return ``MemoryNearLimit``; ``was_near_limit`` is its previous status."""
    if all(one.limit is None for one in metrics.values()):
        text = "no supervisor reports both the memory limit of its engine and the memory in use"
        return ConditionState(type_, None, "NoMetrics", text)
    near = list_pods_near_limit(metrics, was_near_limit)
    text = f"more than {NEAR_LIMIT_RATIO:.0%} of the memory limit is in use and cannot be reclaimed"
    return ConditionState(
        type_, bool(near), "NearLimit" if near else "BelowLimit", _append_pods(f"{text} in", near)
    )


def make_engine_observed_condition(
    type_: ConditionType | PolicyCondition, metrics: Mapping[str, SupervisorMetrics]
) -> ConditionState:
    """Return ``EngineObserved``, with the most important reason that a supervisor reports."""
    if all(one.missing_signals is None for one in metrics.values()):
        return ConditionState(
            type_, None, "NoMetrics", "no supervisor reports which signals it can read"
        )
    lost = find_pods_missing_signals(metrics)
    if not lost:
        return ConditionState(type_, True, "AllSignals")
    text = "; ".join(f"{pod}: {', '.join(reasons)}" for pod, reasons in lost)
    reason = lost[0][1][0]
    return ConditionState(
        type_, False, reason, f"{text} (to see details, run plimsoll doctor)"[:MAX_MESSAGE_CHARS]
    )


def make_metric_conditions(
    metrics: Mapping[str, SupervisorMetrics],
    previous: Object,
    types: type[ConditionType] | type[PolicyCondition],
) -> list[ConditionState]:
    """Return the conditions that depend on the supervisors' values.

    ``previous`` is the previous status.
    """
    already = any(
        one["type"] == types.MEMORY_NEAR_LIMIT and one["status"] == "True"
        for one in previous.get("conditions") or ()
    )
    return [
        make_slow_leak_condition(types.SLOW_LEAK, metrics),
        make_near_limit_condition(types.MEMORY_NEAR_LIMIT, metrics, already),
        make_engine_observed_condition(types.ENGINE_OBSERVED, metrics),
    ]


def make_leak_free_condition(
    type_: ConditionType | PolicyCondition, newest: Sequence[tuple[str, Object]]
) -> ConditionState:
    """Return ``LeakFree`` from the verdicts on the newest revisions.

    ``newest`` are pairs of a workload's name and the verdict on its newest revision.
    """
    if not newest:
        return ConditionState(type_, None, "NoReplicas", "there are no pods with a known revision")
    leaks = {one["leaks"] for _, one in newest}
    worst = next(one for one in (Leaks.YES, Leaks.UNKNOWN, Leaks.NO) if one in leaks)
    text = "; ".join(
        f"{name}{one['revision']}: {one['message']}"
        for name, one in newest
        if one["leaks"] == worst
    )[:MAX_MESSAGE_CHARS]
    if worst is Leaks.YES:
        return ConditionState(type_, False, SAME_LEAK_REASON, text)
    if worst is Leaks.UNKNOWN:
        return ConditionState(type_, None, "ObservationIncomplete", text)
    return ConditionState(type_, True, "NoLeak", text)


def _get_remaining_s(slow: SlowLeak) -> float:
    return math.inf if slow.limit_s is None else slow.limit_s


def _append_pods(text: str, pods: list[str]) -> str:
    return f"{text} {', '.join(pods)}"[:MAX_MESSAGE_CHARS] if pods else ""
