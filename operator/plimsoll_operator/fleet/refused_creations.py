"""Decide from Events whether the API server rejects pods because of their supervisors.

Events are untrusted: anyone who may write them in a namespace can stop the injection there, but
cannot cause anything else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_STATUS_REASON_CHARS
from plimsoll_api.units import parse_quantity
from plimsoll_api.workloads import (
    RAY_API,
    RAY_CLUSTER_LABEL,
    RAY_HEAD,
    RAY_KIND,
    RAY_NODE_TYPE_LABEL,
    RAY_WORKER,
)
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.injection.policy import inject_pod
from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.render.containers import Images, list_all_containers
from plimsoll_operator.render.names import compute_digest

CREATION_FAILED_REASON = "FailedCreate"
"""Reason of the Events in which Kubernetes' own controllers report a rejected pod."""
RAY_CREATION_FAILED_REASONS = {
    "FailedToCreateHeadPod": RAY_HEAD,
    "FailedToCreateWorkerPod": RAY_WORKER,
}
"""Reasons of such Events from KubeRay 1.3 and later, with the Ray node type of the pod."""
EVENT_FIELDS = (f"reason={CREATION_FAILED_REASON}", f"involvedObject.kind={RAY_KIND},type=Warning")
"""Field selectors of the Events to list."""
OWNER_KINDS = {
    ("apps/v1", "ReplicaSet"): Kind("ReplicaSet", "apps", "v1", "replicasets"),
    ("apps/v1", "StatefulSet"): Kind("StatefulSet", "apps", "v1", "statefulsets"),
    ("apps/v1", "DaemonSet"): Kind("DaemonSet", "apps", "v1", "daemonsets"),
    ("batch/v1", "Job"): Kind("Job", "batch", "v1", "jobs"),
    ("v1", "ReplicationController"): Kind(
        "ReplicationController", "", "v1", "replicationcontrollers"
    ),
    (f"{RAY_API}/v1", RAY_KIND): Kind(RAY_KIND, RAY_API, "v1", "rayclusters"),
}
"""Kinds of owners that write these Events, by API version and kind."""

_REFUSAL_PATTERN = re.compile(
    r"\bis (?:forbidden|invalid): |\bdenied the request\b|\bdenied request\b"
)
_UNRELATED_REFUSAL_PATTERN = re.compile(
    r"error looking up service account|because it is being terminated|failed calling webhook"
    r"|already exists|no PriorityClass"
)
"""Pattern for rejections that no container of a pod can cause."""
_QUOTA_PATTERN = re.compile(r"exceeded quota: \S+?, requested: (\S+), used: (\S+), limited: (\S+)")
_CONTAINERS_PATTERN = re.compile(r'\bcontainers? ((?:"[^"]+"(?:, | and )?)+)|\bmust specify (.*)')
"""Pattern for the containers that violate a rule, as Pod Security and quotas list them."""
_QUOTED_PATTERN = re.compile(r'"([^"]+)"|\bfor: ([^;\s]+)')
_POD_PATTERN = re.compile(r'\b[pP]ods? "[^"]*" is (?:forbidden|invalid): ')


@dataclass(frozen=True, slots=True)
class RefusedCreation:
    """Rejection of an owner's pods by the API server.

    ``key`` identifies the owner's UID and the message. ``reported_at`` is RFC 3339.
    ``ray_node_type`` is ``head``, ``worker`` or empty.
    """

    owner: str
    reason: str
    reported_at: str
    key: str = ""
    ray_node_type: str = ""


def parse_refusal_event(event: Object) -> RefusedCreation | None:
    """Parse an Event about a rejected pod. Return None for any other Event."""
    reference, text = event.get("involvedObject") or {}, str(event.get("message") or "")
    ray_node_type = RAY_CREATION_FAILED_REASONS.get(str(event.get("reason")), "")
    if not (ray_node_type or event.get("reason") == CREATION_FAILED_REASON):
        return None
    if not _REFUSAL_PATTERN.search(text) or _UNRELATED_REFUSAL_PATTERN.search(text):
        return None
    time = event.get("lastTimestamp") or event.get("eventTime") or ""
    series = (event.get("series") or {}).get("lastObservedTime")
    prefix = _POD_PATTERN.search(text)
    reason = make_printable_line(text[prefix.end() :] if prefix else text, MAX_STATUS_REASON_CHARS)
    uid = str(reference.get("uid") or "")
    owner = make_printable_line(f"{reference.get('kind')} {reference.get('name')}", 253)
    # A denial may contain the pod's generated name.
    plain = re.sub(r'"[^"]*-[^"]*"', '""', reason)
    return RefusedCreation(
        owner, reason, str(series or time), f"{uid[:36]}/{compute_digest(plain)}", ray_node_type
    )


def find_owner_kind(event: Object) -> Kind | None:
    """Return the kind of the owner that an Event is about; None if the kind is unknown."""
    reference = event.get("involvedObject") or {}
    return OWNER_KINDS.get((str(reference.get("apiVersion")), str(reference.get("kind"))))


def find_supervisor_refusal(
    creation: RefusedCreation, owner: Object, policy: SupervisionPolicy, images: Images
) -> RefusedCreation | None:
    """Return ``creation`` if the policy's supervisor may be the reason; None otherwise."""
    pods = [
        _make_pod_from_template(template, owner, creation.ray_node_type)
        for template in _list_pod_templates(owner, creation.ray_node_type)
    ]
    caused = (_may_be_caused_by_supervisor(creation, pod, policy, images) for pod in pods)
    return creation if any(caused) else None


def _list_pod_templates(owner: Object, ray_node_type: str) -> list[Object]:
    spec = owner.get("spec") or {}
    if not ray_node_type:
        return [spec.get("template") or {}]
    groups = (
        [spec.get("headGroupSpec")]
        if ray_node_type == RAY_HEAD
        else spec.get("workerGroupSpecs") or ()
    )
    return [group.get("template") or {} for group in groups if isinstance(group, dict)]


def _make_pod_from_template(template: Object, owner: Object, ray_node_type: str) -> Object:
    meta, spec = template.get("metadata") or {}, template.get("spec") or {}
    reference = {"apiVersion": owner.get("apiVersion"), "kind": owner.get("kind")}
    reference |= {key: owner["metadata"].get(key) for key in ("name", "uid")}
    pod_meta: Object = {"name": "", "ownerReferences": [reference | {"controller": True}]}
    if ray_node_type:
        ray_labels = {
            RAY_CLUSTER_LABEL: owner["metadata"].get("name"),
            RAY_NODE_TYPE_LABEL: ray_node_type,
        }
        pod_meta["labels"] = (meta.get("labels") or {}) | ray_labels
        spec = spec | {"containers": _add_ray_start(spec.get("containers") or [])}
    return {"metadata": meta | pod_meta, "spec": spec}


# KubeRay adds ``ray start`` before the first command.
def _add_ray_start(containers: list[Object]) -> list[Object]:
    if not containers:
        return []
    first, *others = containers
    words = [*(first.get("command") or ()), *(first.get("args") or ())]
    script = "; ".join(filter(None, ["ray start", shlex.join(map(str, words))]))
    return [first | {"command": ["/bin/sh", "-c", "--"], "args": [script]}, *others]


def _may_be_caused_by_supervisor(
    creation: RefusedCreation, pod: Object, policy: SupervisionPolicy, images: Images
) -> bool:
    if not policy.spec.selector.matches(pod["metadata"].get("labels") or {}):
        return False
    admitted = inject_pod(pod, policy, images)
    if admitted.refusal is not None:
        return False
    before = {one.get("name") for one in list_all_containers(pod["spec"])}
    added = [
        one for one in list_all_containers(admitted.pod["spec"]) if one.get("name") not in before
    ]
    names = {str(one["name"]) for one in added}
    reason = creation.reason
    if quota := _QUOTA_PATTERN.search(reason):
        return _fits_quota_without_supervisor(quota, added)
    named = {
        name
        for groups in _CONTAINERS_PATTERN.findall(reason)
        for quoted, listed in _QUOTED_PATTERN.findall(" ".join(groups))
        for name in (quoted or listed).split(",")
    }
    return named <= names


def _fits_quota_without_supervisor(match: re.Match[str], added_containers: list[Object]) -> bool:
    requested, used, limits = map(_parse_amounts, match.groups())
    counted = [one for one in added_containers if one.get("restartPolicy") == "Always"]
    for name, amount in requested.items():
        added_usage = sum((_compute_usage(one, name) for one in counted), Fraction(0))
        if amount - added_usage > limits.get(name, Fraction(0)) - used.get(name, Fraction(0)):
            return False
    return True


# ``quota_name`` is, for example, ``limits.cpu``.
def _compute_usage(container: Object, quota_name: str) -> Fraction:
    kind, dot, name = quota_name.partition(".")
    resources = container.get("resources") or {}
    amounts: Mapping[str, str] = resources.get(kind if dot else "requests") or {}
    return parse_quantity(str(amounts.get(name if dot else kind, "0")))


# An example is ``limits.cpu=1,memory=2Gi``. A malformed amount counts as zero.
def _parse_amounts(text: str) -> dict[str, Fraction]:
    amounts = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            amounts[name] = Fraction(parse_quantity(amount))
        except ValueError:
            amounts[name] = Fraction(0)
    return amounts
