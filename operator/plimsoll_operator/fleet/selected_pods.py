"""Decide which policy supervises a pod, and summarize the state of its supervision.

The oldest policy that selects a pod supervises it. Anyone who may create pods can set
these labels and annotations, so they never grant access to objects of another pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from plimsoll_api.names import POLICY_LABEL, REFUSED_ANNOTATION, SERVICE_LABEL
from plimsoll_api.roles import PodRole, find_role
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_STATUS_REASON_CHARS
from plimsoll_api.units import parse_bytes
from plimsoll_api.workloads import Membership, find_membership
from plimsoll_operator.fleet.claimed_devices import ClaimUse
from plimsoll_operator.fleet.pods import (
    ENDED_POD_PHASES,
    Container,
    PodView,
    compute_seconds_between,
)
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.injection.policy import (
    ENGINE_ANNOTATION,
    INJECTED_IMAGES_ANNOTATION,
    inject_pod,
)
from plimsoll_operator.kinds import InvalidSpecError, Object, parse_object
from plimsoll_operator.render.containers import Images, list_all_containers, list_native_sidecars
from plimsoll_operator.render.names import FIELD_MANAGER, MANAGED_BY_LABEL, PROBE, SUPERVISOR

MIN_STUCK_AGE_S = 30.0
"""Minimum age of a stuck pod; a registry may fail for a shorter time."""
MAX_IMAGES_CHARS = 1026
MAX_FAILED_STARTS = 2
"""Number of failed starts after which a container counts as unable to start."""
IMMEDIATE_FAILURE_S = 3.0
"""Maximum run time of an engine that fails because it is not process 1. An engine that loads a
model takes longer to import its libraries."""


class SupervisionState(Enum):
    """State of a selected pod. The values are labels of metrics."""

    SUPERVISED = "Supervised"
    WAITING = "Waiting"
    REFUSED = "Refused"
    LEAVING = "Leaving"


SUPERVISED_STATES = (SupervisionState.SUPERVISED, SupervisionState.LEAVING)
"""States of pods that have, or may have had, a supervisor."""


@dataclass(frozen=True, slots=True)
class StartState:
    """Progress of a pod in starting the containers that the injection added.

    ``stuck`` is why the containers cannot start or, if ``is_engine_failure``, why the engine
    terminates at each start. ``images`` is empty if nothing was injected.
    """

    images: str = ""
    has_run: bool = False
    stuck: str = ""
    is_engine_failure: bool = False


@dataclass(frozen=True, slots=True)
class SelectedPod:
    """The operator's summary of a pod that a policy selects.

    Attributes:
        other_policies: The other policies that select the pod, oldest first.
        is_oldest_policy: Whether this policy is older than ``other_policies``.
        may_hold_slot: Whether this policy's supervisor in the pod may hold a restart slot, even
            while the pod terminates.
        created: The creation time (RFC 3339), which distinguishes pods because a StatefulSet reuses
            names.
        view: The status of a supervised pod with a container that is not ready; None otherwise.
        engine: A description of the engine, as the injection recorded it.
        memory_request: The largest memory request of a container in bytes, which is assumed to be
            the engine's.
        role: The pod's role in disaggregated or multi-node serving.
        unhealthy_devices: The pod's devices that the kubelet reports as unhealthy.
        claim_uses: The resource claims of the pod's containers.

    """

    name: str
    account: str
    state: SupervisionState
    reason: str = ""
    other_policies: tuple[str, ...] = ()
    is_oldest_policy: bool = True
    member: Membership = field(default_factory=Membership)
    may_hold_slot: bool = False
    uid: str = ""
    created: str = ""
    view: PodView | None = None
    start: StartState = StartState()
    node: str = ""
    engine: str = ""
    memory_request: int | None = None
    role: PodRole | None = None
    unhealthy_devices: tuple[str, ...] = ()
    claim_uses: tuple[ClaimUse, ...] = ()


def summarize_pod(
    pod: Object,
    policy: SupervisionPolicy,
    selecting_policies: Sequence[str],
    images: Images,
    now: str = "",
) -> SelectedPod:
    """Summarize the state of ``pod`` under ``policy``.

    ``selecting_policies`` are the names of all policies that select the pod, oldest first. If
    ``now`` (RFC 3339) is empty, the time of the last status update is used.
    """
    meta, spec = pod["metadata"], pod.get("spec") or {}
    name = policy.metadata.name
    others = tuple(other for other in selecting_policies if other != name)
    is_oldest = not selecting_policies or selecting_policies[0] == name
    state, reason = _find_supervision_state(pod, name, "" if is_oldest else selecting_policies[0])
    is_oldest = is_oldest or state is SupervisionState.SUPERVISED
    if state is SupervisionState.WAITING and not _has_supervisor(pod):
        # A pod that admission would leave unchanged is not waiting.
        refusal = inject_pod(pod, policy, images).refusal
        state, reason = (SupervisionState.REFUSED, refusal) if refusal else (state, reason)
    account = str(spec.get("serviceAccountName") or "default")
    labels = meta.get("labels") or {}
    over = (pod.get("status") or {}).get("phase") in ENDED_POD_PHASES
    holds = not over and labels.get(POLICY_LABEL) == name and _has_supervisor(pod)
    view = PodView.parse(pod) if state is SupervisionState.SUPERVISED else None
    return SelectedPod(
        name=meta["name"],
        account=account,
        state=state,
        reason=reason,
        other_policies=others,
        is_oldest_policy=is_oldest,
        member=find_membership(meta),
        may_hold_slot=holds and state in (SupervisionState.SUPERVISED, SupervisionState.LEAVING),
        uid=str(meta.get("uid") or ""),
        created=str(meta.get("creationTimestamp") or ""),
        view=None if view is None or view.is_ready else view,
        start=_find_start_state(pod, view, now) if view is not None and holds else StartState(),
        node=str(spec.get("nodeName") or ""),
        engine=make_printable_line(
            str((meta.get("annotations") or {}).get(ENGINE_ANNOTATION, "")), MAX_STATUS_REASON_CHARS
        ),
        memory_request=_find_memory_request(spec),
        role=find_role(labels),
        unhealthy_devices=view.unhealthy_devices if view is not None else (),
        claim_uses=view.claim_uses if view is not None else (),
    )


def _find_memory_request(spec: Object) -> int | None:
    """Return the largest memory request of a container in bytes; None if none has one."""
    requests = ((one.get("resources") or {}).get("requests") or {} for one in spec["containers"])
    return max((parse_bytes(one["memory"]) for one in requests if "memory" in one), default=None)


def compute_next_stuck_s(pods: Iterable[SelectedPod], now: str) -> float | None:
    """Return the seconds until another pod may count as stuck; None if none will."""
    due = [
        MIN_STUCK_AGE_S - age
        for one in pods
        if one.view and one.view.created and not one.start.has_run
        if (age := compute_seconds_between(one.view.created, now)) < MIN_STUCK_AGE_S
    ]
    return max(1.0, min(due)) if due else None


def _find_start_state(pod: Object, view: PodView, now: str) -> StartState:
    listed = {one["name"]: str(one.get("image")) for one in pod["spec"].get("initContainers") or ()}
    own = [name for name in (SUPERVISOR, PROBE) if name in listed]
    images = str((pod["metadata"].get("annotations") or {}).get(INJECTED_IMAGES_ANNOTATION, ""))[
        :MAX_IMAGES_CHARS
    ]
    own_containers = {one.name: one for one in view.init_containers if one.name in own}
    # If the engine has run, its supervisor had started, whatever its state is now.
    has_run = any(one.last_termination or one.state == "running" for one in view.main_containers)
    natives = {one.get("name") for one in list_native_sidecars(pod["spec"])}
    engines = (*view.main_containers, *(one for one in view.init_containers if one.name in natives))
    if loop := next((one for one in engines if _has_failed_immediately(one)), None):
        text = (
            f"container {loop.name} exits immediately after each start"
            f" ({loop.find_cause(now).message}): if it must run as process 1, which is impossible"
            " with a supervisor, exclude its pods from the policy's selector"
        )
        return StartState(
            images, stuck=make_printable_line(text, MAX_STATUS_REASON_CHARS), is_engine_failure=True
        )
    if has_run or (SUPERVISOR in own_containers and own_containers[SUPERVISOR].started):
        return StartState(images, has_run=True)
    if not (view.created and now) or compute_seconds_between(view.created, now) < MIN_STUCK_AGE_S:
        return StartState(images)
    for name, one in own_containers.items():
        cause = one.find_cause(now)
        fails = one.state == "waiting" or one.restarts >= MAX_FAILED_STARTS
        if fails and cause.blocking and not one.is_completed:
            text = f"container {name}, image {listed[name]}: {cause.message}"
            return StartState(images, stuck=make_printable_line(text, MAX_STATUS_REASON_CHARS))
    return StartState(images)


def _has_failed_immediately(container: Container) -> bool:
    times = (
        container.last_termination.get("startedAt"),
        container.last_termination.get("finishedAt"),
    )
    if (
        container.ready
        or container.restarts < MAX_FAILED_STARTS
        or not all(times)
        or container.is_completed
    ):
        return False
    failed = container.last_termination.get("exitCode") != 0 and not container.was_oom_killed
    return (
        failed
        and container.is_backing_off
        and compute_seconds_between(*map(str, times)) <= IMMEDIATE_FAILURE_S
    )


def _find_supervision_state(
    pod: Object, policy: str, older_policy: str
) -> tuple[SupervisionState, str]:
    meta = pod["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    if meta.get("deletionTimestamp") or (pod.get("status") or {}).get("phase") in ENDED_POD_PHASES:
        return SupervisionState.LEAVING, ""
    if labels.get(SERVICE_LABEL) and labels.get(MANAGED_BY_LABEL) == FIELD_MANAGER:
        return SupervisionState.REFUSED, (
            f"InferenceService {labels[SERVICE_LABEL]} already supervises this pod: exclude the"
            " pod from the policy's selector"
        )
    has = _has_supervisor(pod)
    if has and labels.get(POLICY_LABEL) == policy:
        return (
            SupervisionState.SUPERVISED,
            "",
        )  # until the pod is recreated, even if another policy is now older
    if older_policy:
        return SupervisionState.REFUSED, (
            f"the older SupervisionPolicy {older_policy} also selects this pod: narrow the"
            " selector of one policy"
        )
    if has:
        if labels.get(POLICY_LABEL):
            return SupervisionState.WAITING, ""
        return SupervisionState.REFUSED, (
            f"the pod contains a container {SUPERVISOR} that was not added by a SupervisionPolicy:"
            " remove the container from the workload"
        )
    if REFUSED_ANNOTATION in annotations:
        return SupervisionState.REFUSED, make_printable_line(
            str(annotations[REFUSED_ANNOTATION]), MAX_STATUS_REASON_CHARS
        ) or "no reason given"
    return SupervisionState.WAITING, ""  # the pod is older than the policy: nothing injected it


def _has_supervisor(pod: Object) -> bool:
    spec = pod.get("spec") or {}
    return any(one.get("name") == SUPERVISOR for one in list_all_containers(spec))


def parse_policies(items: Iterable[Object]) -> list[SupervisionPolicy]:
    """Return the policies that are valid and not being deleted, oldest first."""
    dated = []
    for item in items:
        meta = item["metadata"]
        if meta.get("deletionTimestamp"):
            continue
        try:
            policy = parse_object(SupervisionPolicy, item)
        except InvalidSpecError:
            continue
        dated.append((str(meta.get("creationTimestamp") or "~"), policy.metadata.name, policy))
    return [policy for _, _, policy in sorted(dated, key=lambda one: one[:2])]


def find_matching_policies(
    policies: Iterable[SupervisionPolicy], labels: Mapping[str, str]
) -> list[SupervisionPolicy]:
    """Return the policies that select a pod with ``labels``; the first one supervises it."""
    return [one for one in policies if one.spec.selector.matches(labels)]
