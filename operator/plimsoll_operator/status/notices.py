"""Find changes of an InferenceService or SupervisionPolicy that cause an Event, in pure functions.

A notice is about a change, so an unchanged object has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll_api.names import POD_HASH_ANNOTATION, RESTART_ID_ANNOTATION
from plimsoll_api.supervision_policy_status import PolicyCondition
from plimsoll_operator.fleet.pods import make_printable_line
from plimsoll_operator.fleet.revisions import RolloutDecision
from plimsoll_operator.kinds import Object
from plimsoll_operator.plans.service import Failure


@dataclass(frozen=True)
class Notice:
    """Event without its object and times. ``reason`` is a CamelCase word."""

    reason: str
    message: str
    type: Literal["Normal", "Warning"] = "Normal"


def rollout_started(
    live: Object | None, desired: Object, decision: RolloutDecision
) -> list[Notice]:
    """Return the notices about a rollout or rollback that applying ``desired`` starts."""
    before, after = _revision(live), _revision(desired)
    notices = []
    restart_id, had = _restart_id(desired), _restart_id(live)
    if live is not None and restart_id != had and before != after:
        said = (
            f"spec.restart.id is now {make_printable_line(restart_id)!r}"
            if restart_id
            else "spec.restart.id was removed"
        )
        notices.append(Notice("RestartRequested", f"{said}: replacing the pods"))
    paused, was_paused = _paused(desired), live is not None and _paused(live)
    if decision.action == "RolledBack" and before != after:
        notices.append(_rollback(before, after, decision))
    elif live is not None and before != after:  # a new service causes no notice
        notices.append(
            Notice("RolloutStarted", f"rollout from revision {before} to {after} started")
        )
    if paused and not was_paused:
        text = f"rollout of revision {after} is on hold: most of its replicas have the same leak"
        notices.append(Notice("RolloutHeld", text, "Warning"))
    elif was_paused and not paused and before == after:
        notices.append(Notice("RolloutResumed", f"rollout of revision {after} continues"))
    return notices


def _rollback(before: str, after: str, decision: RolloutDecision) -> Notice:
    """Return the notice about a rollback; a warning unless a person requested it."""
    if decision.requested:
        text = (
            f"rolling back from revision {before} to {after}"
            " because spec.rollout.revision is LastGood"
        )
        return Notice("RollbackStarted", text)
    text = f"rolling back from revision {before} to {after}: most replicas have the same leak"
    return Notice("RollbackStarted", text, "Warning")


def rollout_finished(before: Object, after: Object) -> list[Notice]:
    """Return the notice about a rollout or rollback that completed between two statuses."""
    was, now = before.get("revisions") or {}, after.get("revisions") or {}
    current = now.get("current")
    if not current or current == was.get("current"):
        return []
    if current == now.get("update"):
        return [Notice("RolloutFinished", f"all replicas run revision {current}")]
    return [Notice("RollbackFinished", f"all replicas run revision {current} again")]


def failure_notice(failure: Failure) -> Notice:
    """Return the notice about a failure, with the API server's message or the spec's error."""
    return Notice(failure.reason, failure.message, "Warning")


def restart_requested(workload: str) -> Notice:
    """Return the notice that a policy requested a rolling restart of ``workload``."""
    text = f"asked {workload} for a rolling restart, because some of its pods have no supervisor"
    return Notice("RestartRequested", text)


def new_suspects(before: Object, after: Object) -> list[Notice]:
    """Return the notices about workloads whose revision became suspect since ``before``."""
    known, suspects = _suspects(before), _suspects(after)
    return [
        Notice(
            "SuspectRevision",
            f"{workload}: {leaking} of {replicas} replicas of revision {revision} have the same"
            f" leak: {leak}",
            "Warning",
        )
        for (workload, revision), (leak, leaking, replicas) in suspects.items()
        if (workload, revision) not in known
    ]


def injection_stopped(before: Object, after: Object) -> list[Notice]:
    """Return the notice that the injection stopped between two statuses of a policy."""
    was, now = (_condition(one, PolicyCondition.INJECTION_STOPPED) for one in (before, after))
    if now.get("reason") == was.get("reason"):
        return []
    if now.get("status") == "True":
        return [Notice("InjectionStopped", now["message"], "Warning")]
    if now.get("reason") == "PodDoesNotStart":
        return [Notice("PodDoesNotStart", now["message"], "Warning")]
    return []


def _condition(status: Object, kind: str) -> Object:
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


def _suspects(status: Object) -> dict[tuple[str, str], tuple[str, int, int]]:
    return {
        (f"{one['kind']}/{one['name']}", found["revision"]): (
            found["leak"], found["leakingReplicas"], found["replicas"],
        )
        for one in status.get("workloads") or ()
        if (found := one.get("suspectRevision"))
    }  # fmt: skip


def _annotation(item: Object | None, name: str) -> str:
    meta = (item or {}).get("metadata") or {}
    return str((meta.get("annotations") or {}).get(name, ""))


def _revision(item: Object | None) -> str:
    return _annotation(item, POD_HASH_ANNOTATION)


def _restart_id(item: Object | None) -> str:
    return _annotation(item, RESTART_ID_ANNOTATION)


def _paused(item: Object) -> bool:
    spec = item.get("spec") or {}
    rolling = (spec.get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    return bool(spec.get("paused") or rolling.get("partition"))
