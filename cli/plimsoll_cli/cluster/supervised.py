"""All supervised pods of a cluster, and which of them a target means."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from plimsoll_api.label_selector import LabelSelector
from plimsoll_api.names import (
    POLICY_KIND,
    POLICY_LABEL,
    POLICY_PLURAL,
    SERVICE_KIND,
    SERVICE_LABEL,
    SERVICE_PLURAL,
    SUPERVISOR_CONTAINER,
)
from plimsoll_api.workloads import membership
from plimsoll_cli.cluster.client import Cluster, Object
from plimsoll_cli.errors import RunError
from plimsoll_cli.targets import Target

CORE = "/api/v1"


def supervised(pod: Object) -> bool:
    """Whether the pod has a supervisor beside its engine."""
    sidecars = pod["spec"].get("initContainers") or ()
    return any(one["name"] == SUPERVISOR_CONTAINER for one in sidecars)


def labelled(cluster: Cluster) -> Iterator[Object]:
    """Every pod of an InferenceService, of a SupervisionPolicy or of ``plimsoll inject``, once."""
    seen = set()
    for label in (SERVICE_LABEL, POLICY_LABEL):
        for pod in cluster.listed(CORE, "pods", labelSelector=label):
            uid = pod["metadata"]["uid"]
            if uid not in seen:
                seen.add(uid)
                yield pod


def of_policy(cluster: Cluster, policy: Object) -> list[Object]:
    """List the pods that ``policy`` selects, with a supervisor or without one.

    Raises RunError if its selector is invalid.
    """
    meta = policy["metadata"]
    try:
        selector = LabelSelector.model_validate((policy.get("spec") or {}).get("selector")).query()
    except ValidationError as error:
        raise RunError(
            f"SupervisionPolicy {meta['name']}: spec.selector: {error.errors()[0]['msg']}"
        ) from None
    namespace = str(meta["namespace"])
    return list(cluster.listed(CORE, "pods", namespace, labelSelector=selector))


def supervised_by(pod: Object, policy: str) -> bool:
    """Whether the supervisor of ``pod`` is one of the policy of this name."""
    return supervised(pod) and (pod["metadata"].get("labels") or {}).get(POLICY_LABEL) == policy


def pods_of(cluster: Cluster, target: Target) -> list[str]:
    """Names of the supervised pods that ``target`` means, which is no pod itself.

    RunError where there is no such object, or none of its pods has a supervisor.
    """
    if target.kind == POLICY_KIND:
        policy = _existing(cluster, POLICY_PLURAL, target)
        pods = [one for one in of_policy(cluster, policy) if supervised_by(one, target.name)]
    elif target.kind == SERVICE_KIND:
        _existing(cluster, SERVICE_PLURAL, target)
        label = f"{SERVICE_LABEL}={target.name}"
        pods = [one for one in cluster.listed(CORE, "pods", labelSelector=label) if supervised(one)]
    else:
        pods = [one for one in labelled(cluster) if supervised(one) and _is_of(one, target)]
    names = sorted(str(one["metadata"]["name"]) for one in pods if not over(one))
    if not names:
        raise RunError(
            f"{target}: no pod in namespace {cluster.namespace or 'default'} belongs to it and has"
            " a supervisor; to find out why, run: plimsoll doctor"
        )
    return names


def _existing(cluster: Cluster, plural: str, target: Target) -> Object:
    found = cluster.named(plural, target.name)
    if found is None:
        raise RunError(
            f"{target}: not in namespace {cluster.namespace or 'default'}; see: plimsoll top -A"
        )
    return found


def _is_of(pod: Object, target: Target) -> bool:
    meta = pod["metadata"]
    owners = {(one.get("kind"), one.get("name")) for one in meta.get("ownerReferences") or ()}
    workload = membership(meta).workload
    if workload is not None:
        owners.add((workload.kind, workload.name))
    return (target.kind, target.name) in owners


def over(pod: Object) -> bool:
    """Return whether the pod has ended, or is about to."""
    phase = (pod.get("status") or {}).get("phase")
    return bool(pod["metadata"].get("deletionTimestamp")) or phase in ("Succeeded", "Failed")
