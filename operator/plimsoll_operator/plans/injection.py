"""Decide whether new pods of a policy get a supervisor: the circuit breaker of the injection.

A pod fails if its supervisor cannot start. Until one pod of a policy has run with the current
images, only a few pods at a time get a supervisor. Injection stops if several of them are stuck, or
if the API server rejects pods that got a supervisor.

The operator writes the decision to ``status.injection``, which every replica's webhook reads.
Forged pods or Events can only stop or resume the injection in their own namespace.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_UNRELATED_REFUSALS, Injection, InjectionStop
from plimsoll_operator.fleet.pods import compute_seconds_between
from plimsoll_operator.fleet.refused_creations import RefusedCreation
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.kinds import Object

RETRY_ANNOTATION = "plimsoll.dev/retry-injection"
"""Annotation of a policy; changing its value after a stop requests another attempt."""
MAX_RETRY_CHARS = 256
STOP_PROPAGATION_S = 15.0
"""Seconds after a stop until every webhook has read it; webhooks read the policies every 2 s."""


def parse_injection(status: Object | None) -> Injection | None:
    """Parse ``status.injection``. Return None if it is absent or malformed."""
    try:
        return Injection.model_validate((status or {}).get("injection"))
    except ValidationError:
        return None


def decide_injection(
    previous: Injection | None,
    policy: SupervisionPolicy,
    images: str,
    pods: Sequence[SelectedPod],
    limit: int,
    now: str,
    refusals: Sequence[RefusedCreation] = (),
) -> Object:
    """Return the new ``status.injection`` from the previous one and the policy's pods.

    Injection stops if ``limit`` pods are stuck, or if ``refusals`` contains a recent rejection of a
    pod of the policy. It resumes once ``images``, the policy's generation or the annotation
    :data:`RETRY_ANNOTATION` changes. ``now`` is RFC 3339.
    """
    last = (
        previous if previous is not None and previous.images == images else Injection(images=images)
    )
    stopped, since, proven = last.stopped, last.since, last.proven
    anyway = last.refused_anyway
    if stopped is not None and not _is_still_stopped(stopped, policy):
        stopped, since, proven = None, now, False
    elif stopped is not None and any(
        _is_refused_without_supervisor(stopped, one) for one in refusals
    ):
        anyway = [*anyway, stopped.refusal][-MAX_UNRELATED_REFUSALS:]
        stopped, since = None, now
    injected = [
        one for one in pods
        if one.state is SupervisionState.SUPERVISED and one.start.images == images
        and one.created >= (since or "")
    ]  # fmt: skip
    proven = proven or any(one.start.has_run for one in injected)
    # If other engines run with this supervisor, an engine that exits is no evidence against it.
    stuck = sorted(
        (
            one
            for one in injected
            if one.start.stuck and not (one.start.is_engine_failure and proven)
        ),
        key=lambda one: one.name,
    )
    new = [one for one in refusals if one.reported_at > (since or "") and one.key not in anyway]
    cause = None
    if new:
        cause = (new[0].owner, new[0].reason, new[0].key)
    elif _count_failures(stuck, injected) >= limit:
        cause = (stuck[0].name, stuck[0].start.stuck, "")
    if stopped is None and cause is not None:
        pod, reason, refusal = cause
        stopped = InjectionStop(
            pod=pod,
            reason=reason,
            time=now,
            generation=policy.metadata.generation,
            retry=_get_retry_value(policy),
            refusal=refusal,
        )
    found = Injection(
        images=images,
        proven=stopped is None and proven,
        waiting=len(
            {one.member.get_replica_name(one.name) for one in injected if not one.start.has_run}
        ),
        since=since,
        stopped=stopped,
        refused_anyway=anyway,
    )
    written: Object = found.model_dump(mode="json", by_alias=True, exclude_none=True)
    return written


def find_skip_reason(
    policy: SupervisionPolicy, previous: Injection | None, images: str, unrecorded: int, limit: int
) -> str:
    """Return why a new pod of ``policy`` gets no supervisor; empty if it gets one.

    ``unrecorded`` is the number of replicas that got a supervisor but are not yet counted in the
    policy's status.
    """
    last = (
        previous if previous is not None and previous.images == images else Injection(images=images)
    )
    if last.stopped is not None and _is_still_stopped(last.stopped, policy):
        return f"the injection of supervisors is stopped, because {describe_stop(last.stopped)}"
    if last.proven:
        return ""
    waiting = max(unrecorded, last.waiting if last.stopped is None else 0)
    if waiting < limit:
        return ""
    return f"no pod has run with {images} yet, and {waiting} replicas are starting"


def describe_stop(stop: InjectionStop) -> str:
    """Return a clause that names the pod or owner whose failure stopped the injection."""
    if stop.refusal:
        return f"the API server rejects pods of {stop.pod} that have a supervisor"
    return f"pod {stop.pod} cannot start"


def _is_refused_without_supervisor(stop: InjectionStop, refusal: RefusedCreation) -> bool:
    same = bool(stop.refusal) and refusal.key.split("/")[0] == stop.refusal.split("/")[0]
    return (
        same
        and bool(refusal.reported_at)
        and compute_seconds_between(stop.time, refusal.reported_at) > STOP_PROPAGATION_S
    )


# Several stuck pods on a single broken node are no evidence against the images, so nodes count if
# an injected pod runs on another node.
def _count_failures(stuck: Sequence[SelectedPod], injected: Sequence[SelectedPod]) -> int:
    nodes = {one.node for one in stuck}
    elsewhere = {one.node for one in injected if one.start.has_run} - nodes - {""}
    return len(nodes) if elsewhere and "" not in nodes else len(stuck)


def _get_retry_value(policy: SupervisionPolicy) -> str:
    return policy.metadata.annotations.get(RETRY_ANNOTATION, "")[:MAX_RETRY_CHARS]


def _is_still_stopped(stop: InjectionStop, policy: SupervisionPolicy) -> bool:
    return (stop.generation, stop.retry) == (
        policy.metadata.generation,
        _get_retry_value(policy),
    )
