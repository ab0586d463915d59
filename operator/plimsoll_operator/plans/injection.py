"""The circuit breaker of injection: whether the new pods of a policy get a supervisor.

An engine starts after its supervisor, so a supervisor that cannot start costs the pod. Until one
pod of a policy has run with the present images, only a few pods at a time get them. Once several
pods are stuck with them, no further pod gets them until a person asks for another try.

The operator decides and writes ``status.injection``, which the webhook of each replica reads.
Anyone who may create pods in a namespace can forge what a pod says here, and so stop or resume the
injection of a policy of that namespace, but nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import Injection, InjectionStop
from plimsoll_operator.fleet.selected_pods import SelectedPod, State
from plimsoll_operator.kinds import Object

RETRY = "plimsoll.dev/retry-injection"
"""Annotation of a policy: another value than at the stop asks for another try."""
MAX_RETRY = 256


def known(status: Object | None) -> Injection | None:
    """Read ``status.injection``; None if there is none that can be read."""
    try:
        return Injection.model_validate((status or {}).get("injection"))
    except ValidationError:
        return None


def decide(
    before: Injection | None,
    policy: SupervisionPolicy,
    images: str,
    pods: Sequence[SelectedPod],
    limit: int,
    now: str,
) -> Object:
    """Return ``status.injection``, by the last one and the policy's pods. ``now`` is RFC 3339.

    ``limit`` stuck pods stop the injection. It resumes with other images, another generation of
    the policy or another value of :data:`RETRY`; after that, only younger pods count.
    """
    same = before if before is not None and before.images == images else Injection(images=images)
    stopped, since, proven = same.stopped, same.since, same.proven
    if stopped is not None and not _stands(stopped, policy):
        stopped, since, proven = None, now, False
    ours = [
        one for one in pods
        if one.state is State.SUPERVISED and one.start.images == images
        and one.created >= (since or "")
    ]  # fmt: skip
    stuck = sorted((one for one in ours if one.start.stuck), key=lambda one: one.name)
    if stopped is None and len(stuck) >= limit:
        stopped = InjectionStop(
            pod=stuck[0].name,
            reason=stuck[0].start.stuck,
            time=now,
            generation=policy.metadata.generation,
            retry=_retry(policy),
        )
    found = Injection(
        images=images,
        proven=stopped is None and (proven or any(one.start.ran for one in ours)),
        waiting=len({one.member.replica(one.name) for one in ours if not one.start.ran}),
        since=since,
        stopped=stopped,
    )
    made: Object = found.model_dump(mode="json", by_alias=True, exclude_none=True)
    return made


def held_back(
    policy: SupervisionPolicy, before: Injection | None, images: str, tried: int, limit: int
) -> str:
    """Say why a new pod of ``policy`` is created without a supervisor; empty if it gets one.

    ``tried`` replicas got one from this webhook so recently that the status may not count them yet.
    """
    same = before if before is not None and before.images == images else Injection(images=images)
    if same.stopped is not None and _stands(same.stopped, policy):
        return f"injection is stopped, because pod {same.stopped.pod} does not start"
    if same.proven:
        return ""
    waiting = max(tried, same.waiting if same.stopped is None else 0)
    if waiting < limit:
        return ""
    return f"{waiting} replicas wait for {images}, with which no pod has run yet"


def _retry(policy: SupervisionPolicy) -> str:
    return policy.metadata.annotations.get(RETRY, "")[:MAX_RETRY]


def _stands(stopped: InjectionStop, policy: SupervisionPolicy) -> bool:
    """Whether the policy is the same as at the stop, and no other try was asked for."""
    return (stopped.generation, stopped.retry) == (policy.metadata.generation, _retry(policy))
