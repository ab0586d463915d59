"""Find the supervised pods of a cluster, a policy or a target."""

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
from plimsoll_api.workloads import find_membership
from plimsoll_cli.cluster.client import Cluster, Object
from plimsoll_cli.errors import RunError
from plimsoll_cli.targets import Target

CORE_API_PATH = "/api/v1"


def is_supervised(pod: Object) -> bool:
    """Report whether the pod has a supervisor."""
    sidecars = pod["spec"].get("initContainers") or ()
    return any(one["name"] == SUPERVISOR_CONTAINER for one in sidecars)


def list_labelled_pods(cluster: Cluster) -> Iterator[Object]:
    """Yield the pods with a label of Plimsoll: each pod of a service or policy, or from inject."""
    seen = set()
    for label in (SERVICE_LABEL, POLICY_LABEL):
        for pod in cluster.list_objects(CORE_API_PATH, "pods", labelSelector=label):
            uid = pod["metadata"]["uid"]
            if uid not in seen:
                seen.add(uid)
                yield pod


def list_policy_pods(cluster: Cluster, policy: Object) -> list[Object]:
    """Return the pods that ``policy`` selects, including those without a supervisor.

    Raises RunError if the policy's selector is invalid.
    """
    meta = policy["metadata"]
    try:
        selector = LabelSelector.model_validate(
            (policy.get("spec") or {}).get("selector")
        ).to_query()
    except ValidationError as error:
        raise RunError(
            f"SupervisionPolicy {meta['name']}: spec.selector: {error.errors()[0]['msg']}"
        ) from None
    namespace = str(meta["namespace"])
    return list(cluster.list_objects(CORE_API_PATH, "pods", namespace, labelSelector=selector))


def is_supervised_by(pod: Object, policy: str) -> bool:
    """Report whether the pod's supervisor belongs to the named policy."""
    return is_supervised(pod) and (pod["metadata"].get("labels") or {}).get(POLICY_LABEL) == policy


def list_target_pods(cluster: Cluster, target: Target) -> list[str]:
    """Return the names of the supervised pods of ``target``, which is not a pod itself.

    Raises RunError if ``target`` does not exist or has no supervised pods.
    """
    if target.kind == POLICY_KIND:
        policy = _get_required_object(cluster, POLICY_PLURAL, target)
        pods = [
            one for one in list_policy_pods(cluster, policy) if is_supervised_by(one, target.name)
        ]
    elif target.kind == SERVICE_KIND:
        _get_required_object(cluster, SERVICE_PLURAL, target)
        label = f"{SERVICE_LABEL}={target.name}"
        pods = [
            one
            for one in cluster.list_objects(CORE_API_PATH, "pods", labelSelector=label)
            if is_supervised(one)
        ]
    else:
        pods = [
            one
            for one in list_labelled_pods(cluster)
            if is_supervised(one) and _belongs_to(one, target)
        ]
    names = sorted(str(one["metadata"]["name"]) for one in pods if not has_ended(one))
    if not names:
        raise RunError(
            f"{target} has no supervised pods in namespace {cluster.namespace or 'default'}: to"
            " find out why, run: plimsoll doctor"
        )
    return names


def _get_required_object(cluster: Cluster, plural: str, target: Target) -> Object:
    found = cluster.get_custom_object(plural, target.name)
    if found is None:
        raise RunError(
            f"{target} does not exist in namespace {cluster.namespace or 'default'}: check the"
            " name and -n; to list services and policies, run: plimsoll top -A"
        )
    return found


def _belongs_to(pod: Object, target: Target) -> bool:
    meta = pod["metadata"]
    owners = {(one.get("kind"), one.get("name")) for one in meta.get("ownerReferences") or ()}
    workload = find_membership(meta).workload
    if workload is not None:
        owners.add((workload.kind, workload.name))
    return (target.kind, target.name) in owners


def has_ended(pod: Object) -> bool:
    """Report whether the pod has ended or is being deleted."""
    phase = (pod.get("status") or {}).get("phase")
    return bool(pod["metadata"].get("deletionTimestamp")) or phase in ("Succeeded", "Failed")
