"""Define when and how to restart a workload for ``spec.rollout: Restart``.

The operator only patches the pod template; the workload's own controller replaces the pods.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.workloads import APPS_API_GROUP, WorkloadRef
from plimsoll_operator.fleet.selected_pods import SupervisionState
from plimsoll_operator.fleet.workloads import Workload
from plimsoll_operator.kinds import Kind, Object

ROLLOUT_FIELD_MANAGER = "plimsoll-operator-rollout"
RESTARTED_AT_ANNOTATION = "kubectl.kubernetes.io/restartedAt"
RESTARTED_FOR_ANNOTATION = "plimsoll.dev/restarted-for"
"""Annotation of a workload: UID and generation of the policy that last requested a restart."""

RESTART_REQUESTED_MESSAGE = (
    "the operator requested a rolling restart; if pods still have no supervisor afterwards, for"
    " example because a partition holds them back, recreate them yourself"
)
WEBHOOK_OFF_MESSAGE = (
    "the operator runs without its webhook, so a restart would not add a supervisor"
)
WEBHOOK_NOT_READY_MESSAGE = "waiting until the operator's webhook is ready"
UNPROVEN_MESSAGE = "waiting until a pod of another workload has started with a supervisor"
STOPPED_MESSAGE = "the injection of supervisors is stopped: see the condition InjectionStopped"
SUSPECT_REVISION_MESSAGE = (
    "the workload is not restarted, because most replicas of one of its revisions have the same"
    " leak"
)

OBJECT_NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
DEPLOYMENT, STATEFUL_SET, DAEMON_SET = (
    Kind(kind, APPS_API_GROUP, "v1", f"{kind.lower()}s", "")
    for kind in ("Deployment", "StatefulSet", "DaemonSet")
)
RESTARTABLE_KINDS = {kind.kind: kind for kind in (DEPLOYMENT, STATEFUL_SET, DAEMON_SET)}


def list_waiting_workloads(workloads: Sequence[Workload]) -> list[Workload]:
    """Return the workloads with pods that will get a supervisor once they are recreated."""
    return [one for one in workloads if one.count_pods(SupervisionState.WAITING)]


def find_restartable_kind(workload: Workload) -> Kind | None:
    """Return the workload's kind if the operator can restart the workload; None otherwise.

    The name is untrusted and becomes part of a URL, so it must be valid.
    """
    if (
        workload.ref is None
        or workload.api_group != APPS_API_GROUP
        or not OBJECT_NAME_PATTERN.fullmatch(workload.ref.name)
    ):
        return None
    return RESTARTABLE_KINDS.get(workload.ref.kind)


def explain_manual_restart(ref: WorkloadRef | None) -> str:
    """Return why the operator cannot restart a workload, and what to do instead."""
    if ref is None:
        return "these pods belong to no workload: recreate them yourself"
    return (
        f"the operator cannot request a rolling restart of a {ref.kind}: restart the workload"
        " yourself"
    )


def is_restart_requested(live: Object, policy: SupervisionPolicy, is_trial: bool = False) -> bool:
    """Report whether the operator already restarted the workload for this policy generation.

    A restart in a trial counts only during the trial.
    """
    annotations = live["metadata"].get("annotations") or {}
    marks = {_make_restart_marker(policy), _make_restart_marker(policy, is_trial)}
    return annotations.get(RESTARTED_FOR_ANNOTATION) in marks


def find_restart_obstacle(live: Object, policy: SupervisionPolicy) -> str:
    """Return why a restart must wait or would replace no pod; empty if nothing prevents it."""
    meta, spec, status = live["metadata"], live.get("spec") or {}, live.get("status") or {}
    template = (spec.get("template") or {}).get("metadata") or {}
    strategy = (spec.get("updateStrategy") or {}).get("type")
    if meta.get("deletionTimestamp"):
        return "the workload is being deleted"
    if not policy.spec.selector.matches(template.get("labels") or {}):
        return (
            "the policy's selector does not match the workload's pod template: restart the"
            " workload yourself"
        )
    if spec.get("paused"):
        return "the workload's rollout is paused: resume it"
    if strategy == "OnDelete":
        return "the workload's updateStrategy is OnDelete: delete the pods yourself"
    partition, replicas = _get_partition(spec), spec.get("replicas", 1)
    if partition >= replicas > 0:
        return (
            f"the workload's updateStrategy has the partition {partition}, which holds back all of"
            f" its {replicas} replicas: set a smaller partition"
        )
    if _is_rolling_out(live["kind"], meta, spec, status):
        return "waiting until the current rollout is complete"
    return ""


def make_restart_patch(
    live: Object, policy: SupervisionPolicy, now: str, is_trial: bool = False
) -> Object:
    """Return the patch that restarts the workload, for the manager :data:`ROLLOUT_FIELD_MANAGER`.

    It contains the workload's UID, so the API server rejects it for a new workload with the same
    name.
    """
    meta = live["metadata"]
    return {
        "apiVersion": live["apiVersion"],
        "kind": live["kind"],
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
            "annotations": {RESTARTED_FOR_ANNOTATION: _make_restart_marker(policy, is_trial)},
        },
        "spec": {"template": {"metadata": {"annotations": {RESTARTED_AT_ANNOTATION: now}}}},
    }


def _get_partition(spec: Object) -> int:
    """Return how many pods of a StatefulSet keep their revision in a rollout."""
    rolling = (spec.get("updateStrategy") or {}).get("rollingUpdate") or {}
    return int(rolling.get("partition") or 0)


def _is_rolling_out(kind: str, meta: Object, spec: Object, status: Object) -> bool:
    if status.get("observedGeneration", 0) < meta.get("generation", 0):
        return True
    if kind == DAEMON_SET.kind:
        scheduled = status.get("desiredNumberScheduled", 0)
        return bool(status.get("updatedNumberScheduled", 0) < scheduled)
    if kind == STATEFUL_SET.kind:
        if status.get("updateRevision") == status.get("currentRevision"):
            return False
        # A partition keeps the revisions apart for good, so the rollout ends with the other pods.
        partition, replicas = _get_partition(spec), spec.get("replicas", 1)
        ready, updated = status.get("readyReplicas", 0), status.get("updatedReplicas", 0)
        return not partition or bool(ready < replicas or updated < replicas - partition)
    return bool(status.get("updatedReplicas", 0) < status.get("replicas", 0))


def _make_restart_marker(policy: SupervisionPolicy, is_trial: bool = False) -> str:
    return f"{policy.metadata.uid}/{policy.metadata.generation}" + ("/trial" if is_trial else "")
