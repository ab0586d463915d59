"""The circuit breaker of injection: whether the new pods of a policy get a supervisor.

An engine starts after its supervisor, so a supervisor that cannot start costs the pod. Until one
pod of a policy has run with the present images, only a few pods at a time get them. Once several
pods are stuck with them, or the API server refuses pods for them, no further pod gets them until a
person asks for another try. If it then refuses the same owner's pods without them, they were not
why, and the injection goes on.

The operator decides and writes ``status.injection``, which the webhook of each replica reads.
Anyone who may create pods or Events in a namespace can forge what they say here, and so stop or
resume the injection of a policy of that namespace, but nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_ANYWAY, Injection, InjectionStop
from plimsoll_operator.fleet.pods import seconds
from plimsoll_operator.fleet.refused_creations import RefusedCreation
from plimsoll_operator.fleet.selected_pods import SelectedPod, State
from plimsoll_operator.kinds import Object

RETRY = "plimsoll.dev/retry-injection"
"""Annotation of a policy: another value than at the stop asks for another try."""
MAX_RETRY = 256
SETTLED_S = 15.0
"""After a stop, every webhook knows of it: they read the policies every 2 s."""


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
    refused: Sequence[RefusedCreation] = (),
) -> Object:
    """Return ``status.injection``, by the last one and the policy's pods. ``now`` is RFC 3339.

    ``limit`` stuck pods stop the injection, and so does one of ``refused``, the recent refusals to
    create pods of the policy. It resumes with other images, another generation of the policy or
    another value of :data:`RETRY`; after that, only younger pods and refusals count.
    """
    same = before if before is not None and before.images == images else Injection(images=images)
    stopped, since, proven = same.stopped, same.since, same.proven
    anyway = same.refused_anyway
    if stopped is not None and not _stands(stopped, policy):
        stopped, since, proven = None, now, False
    elif stopped is not None and any(_without(stopped, one) for one in refused):
        anyway = [*anyway, stopped.refusal][-MAX_ANYWAY:]
        stopped, since = None, now
    ours = [
        one for one in pods
        if one.state is State.SUPERVISED and one.start.images == images
        and one.created >= (since or "")
    ]  # fmt: skip
    proven = proven or any(one.start.ran for one in ours)
    # An engine that ends is its own affair where others run beside the same supervisor.
    stuck = sorted(
        (one for one in ours if one.start.stuck and not (one.start.engine and proven)),
        key=lambda one: one.name,
    )
    new = [one for one in refused if one.at > (since or "") and one.key not in anyway]
    why = None
    if new:
        why = (new[0].owner, new[0].reason, new[0].key)
    elif _count(stuck, ours) >= limit:
        why = (stuck[0].name, stuck[0].start.stuck, "")
    if stopped is None and why is not None:
        pod, reason, refusal = why
        stopped = InjectionStop(
            pod=pod,
            reason=reason,
            time=now,
            generation=policy.metadata.generation,
            retry=_retry(policy),
            refusal=refusal,
        )
    found = Injection(
        images=images,
        proven=stopped is None and proven,
        waiting=len({one.member.replica(one.name) for one in ours if not one.start.ran}),
        since=since,
        stopped=stopped,
        refused_anyway=anyway,
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
        return f"injection is stopped, because {because(same.stopped)}"
    if same.proven:
        return ""
    waiting = max(tried, same.waiting if same.stopped is None else 0)
    if waiting < limit:
        return ""
    return f"{waiting} replicas wait for {images}, with which no pod has run yet"


def because(stopped: InjectionStop) -> str:
    """Say in a few words whom the injection was stopped for."""
    if stopped.refusal:
        return f"the API server refuses pods of {stopped.pod} with a supervisor"
    return f"pod {stopped.pod} does not start"


def _without(stopped: InjectionStop, refused: RefusedCreation) -> bool:
    """Whether the API server refuses the pods of the same owner without a supervisor, too."""
    same = bool(stopped.refusal) and refused.key.split("/")[0] == stopped.refusal.split("/")[0]
    return same and bool(refused.at) and seconds(stopped.time, refused.at) > SETTLED_S


def _count(stuck: Sequence[SelectedPod], ours: Sequence[SelectedPod]) -> int:
    """Count the stuck pods; where others of ``ours`` run on another node, the nodes of the stuck.

    One broken node says nothing of the images.
    """
    nodes = {one.node for one in stuck}
    elsewhere = {one.node for one in ours if one.start.ran} - nodes - {""}
    return len(nodes) if elsewhere and "" not in nodes else len(stuck)


def _retry(policy: SupervisionPolicy) -> str:
    return policy.metadata.annotations.get(RETRY, "")[:MAX_RETRY]


def _stands(stopped: InjectionStop, policy: SupervisionPolicy) -> bool:
    """Whether the policy is the same as at the stop, and no other try was asked for."""
    return (stopped.generation, stopped.retry) == (policy.metadata.generation, _retry(policy))
