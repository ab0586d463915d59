"""Build the Events about changes of an InferenceService or SupervisionPolicy, in pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll_api.names import POD_HASH_ANNOTATION, RESTART_ID_ANNOTATION
from plimsoll_api.supervision_policy_status import PolicyCondition
from plimsoll_operator.fleet.revisions import RolloutDecision
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.kinds import Object
from plimsoll_operator.plans.service import Failure


@dataclass(frozen=True)
class Notice:
    """Event without its object and times; ``reason`` is in CamelCase."""

    reason: str
    message: str
    type: Literal["Normal", "Warning"] = "Normal"


def make_rollout_notices(
    live: Object | None, desired: Object, decision: RolloutDecision
) -> list[Notice]:
    """Return notices about the rollout or rollback that starts when ``desired`` is applied."""
    previous, current = _get_revision(live), _get_revision(desired)
    notices = []
    restart_id, had = _get_restart_id(desired), _get_restart_id(live)
    if live is not None and restart_id != had and previous != current:
        said = (
            f"spec.restart.id was set to {make_printable_line(restart_id)!r}"
            if restart_id
            else "spec.restart.id was removed"
        )
        notices.append(Notice("RestartRequested", f"{said}; replacing all pods"))
    paused, was_paused = _is_paused(desired), live is not None and _is_paused(live)
    if decision.action == "RolledBack" and previous != current:
        notices.append(_make_rollback_notice(previous, current, decision))
    elif live is not None and previous != current:  # a new service causes no notice
        notices.append(
            Notice("RolloutStarted", f"started the rollout from revision {previous} to {current}")
        )
    if paused and not was_paused:
        text = (
            f"paused the rollout of revision {current}, because most of its replicas have the same"
            " leak"
        )
        notices.append(Notice("RolloutHeld", text, "Warning"))
    elif was_paused and not paused and previous == current:
        notices.append(Notice("RolloutResumed", f"resumed the rollout of revision {current}"))
    return notices


# The notice is a warning unless a person requested the rollback.
def _make_rollback_notice(previous: str, current: str, decision: RolloutDecision) -> Notice:
    if decision.requested:
        text = (
            f"rolling back from revision {previous} to {current}, because spec.rollout.revision is"
            " LastGood"
        )
        return Notice("RollbackStarted", text)
    text = (
        f"rolling back from revision {previous} to {current}, because most replicas have the same"
        " leak"
    )
    return Notice("RollbackStarted", text, "Warning")


def make_completion_notices(previous: Object, current: Object) -> list[Notice]:
    """Return a notice if a rollout or rollback has completed since the status ``previous``."""
    was, now = previous.get("revisions") or {}, current.get("revisions") or {}
    revision = now.get("current")
    if not revision or revision == was.get("current"):
        return []
    if revision == now.get("update"):
        return [
            Notice(
                "RolloutFinished", f"completed the rollout: all replicas run revision {revision}"
            )
        ]
    return [
        Notice(
            "RollbackFinished",
            f"completed the rollback: all replicas run revision {revision} again",
        )
    ]


def make_failure_notice(failure: Failure) -> Notice:
    """Return the notice about a failure to apply a spec."""
    return Notice(failure.reason, failure.message, "Warning")


def make_restart_notice(workload: str) -> Notice:
    """Return the notice that a policy requested a rolling restart of ``workload``."""
    text = f"requested a rolling restart of {workload}, because some of its pods have no supervisor"
    return Notice("RestartRequested", text)


def make_suspect_notices(previous: Object, current: Object) -> list[Notice]:
    """Return a notice for each workload with a revision that became suspect since ``previous``."""
    known, suspects = _index_suspects(previous), _index_suspects(current)
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


def make_injection_notices(previous: Object, current: Object) -> list[Notice]:
    """Return a notice if a policy's injection has stopped since the status ``previous``."""
    was, now = (
        _find_condition(one, PolicyCondition.INJECTION_STOPPED) for one in (previous, current)
    )
    if now.get("reason") == was.get("reason"):
        return []
    if now.get("status") == "True":
        return [Notice("InjectionStopped", now["message"], "Warning")]
    if now.get("reason") == "PodDoesNotStart":
        return [Notice("PodDoesNotStart", now["message"], "Warning")]
    return []


def _find_condition(status: Object, kind: str) -> Object:
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


def _index_suspects(status: Object) -> dict[tuple[str, str], tuple[str, int, int]]:
    return {
        (f"{one['kind']}/{one['name']}", found["revision"]): (
            found["leak"], found["leakingReplicas"], found["replicas"],
        )
        for one in status.get("workloads") or ()
        if (found := one.get("suspectRevision"))
    }  # fmt: skip


def _get_annotation(item: Object | None, name: str) -> str:
    meta = (item or {}).get("metadata") or {}
    return str((meta.get("annotations") or {}).get(name, ""))


def _get_revision(item: Object | None) -> str:
    return _get_annotation(item, POD_HASH_ANNOTATION)


def _get_restart_id(item: Object | None) -> str:
    return _get_annotation(item, RESTART_ID_ANNOTATION)


def _is_paused(item: Object) -> bool:
    spec = item.get("spec") or {}
    rolling = (spec.get("rolloutStrategy") or {}).get("rollingUpdateConfiguration") or {}
    return bool(spec.get("paused") or rolling.get("partition"))
