"""Pods that the API server refuses to create: by an owner's Event, and whether a supervisor is why.

A quota, a LimitRange, Pod Security or another admission rule may refuse a pod for what an injection
added. Then there is no pod that could say so: its owner writes an Event and tries again.

Texts and times of an Event are its writer's claim. Whoever may write Events in a namespace can
stop the injection of a policy there, and nothing else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_REASON
from plimsoll_api.units import quantity
from plimsoll_api.workloads import (
    RAY_API,
    RAY_CLUSTER,
    RAY_HEAD,
    RAY_KIND,
    RAY_NODE,
    RAY_WORKER,
)
from plimsoll_operator.fleet.pods import clean
from plimsoll_operator.injection.policy import admit
from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.render.containers import Images, every_container
from plimsoll_operator.render.names import digest

REASON = "FailedCreate"
"""Reason of the Events of Kubernetes' own controllers."""
RAY_REASONS = {"FailedToCreateHeadPod": RAY_HEAD, "FailedToCreateWorkerPod": RAY_WORKER}
"""Reasons of those of KubeRay since 1.3, with the type of the node that the pod is."""
EVENT_FIELDS = (f"reason={REASON}", f"involvedObject.kind={RAY_KIND},type=Warning")
"""Of which Events the API server is asked: of a selector, all parts must hold."""
OWNERS = {
    ("apps/v1", "ReplicaSet"): Kind("ReplicaSet", "apps", "v1", "replicasets"),
    ("apps/v1", "StatefulSet"): Kind("StatefulSet", "apps", "v1", "statefulsets"),
    ("apps/v1", "DaemonSet"): Kind("DaemonSet", "apps", "v1", "daemonsets"),
    ("batch/v1", "Job"): Kind("Job", "batch", "v1", "jobs"),
    ("v1", "ReplicationController"): Kind(
        "ReplicationController", "", "v1", "replicationcontrollers"
    ),
    (f"{RAY_API}/v1", RAY_KIND): Kind(RAY_KIND, RAY_API, "v1", "rayclusters"),
}
"""API version and kind of owners that write them."""

_REFUSED = re.compile(r"\bis (?:forbidden|invalid): |\bdenied the request\b|\bdenied request\b")
_OTHER = re.compile(
    r"error looking up service account|because it is being terminated|failed calling webhook"
    r"|already exists|no PriorityClass"
)
"""Refusals that no container of a pod can cause."""
_QUOTA = re.compile(r"exceeded quota: \S+?, requested: (\S+), used: (\S+), limited: (\S+)")
_CONTAINERS = re.compile(r'\bcontainers? ((?:"[^"]+"(?:, | and )?)+)|\bmust specify (.*)')
"""As Pod Security and a quota name containers: those that do not comply."""
_QUOTED = re.compile(r'"([^"]+)"|\bfor: ([^;\s]+)')
_POD = re.compile(r'\b[pP]ods? "[^"]*" is (?:forbidden|invalid): ')


@dataclass(frozen=True, slots=True)
class RefusedCreation:
    """What the API server said of the pods of one ``owner``, last at ``at`` (RFC 3339).

    ``key`` begins with the owner's uid, and is the same for another try with the same answer.
    ``node`` is the type of the Ray node that the pod is, empty where it is none.
    """

    owner: str
    reason: str
    at: str
    key: str = ""
    node: str = ""


def read_event(event: Object) -> RefusedCreation | None:
    """Read an Event of a pod that was refused; None for another failure."""
    about, text = event.get("involvedObject") or {}, str(event.get("message") or "")
    node = RAY_REASONS.get(str(event.get("reason")), "")
    if not (node or event.get("reason") == REASON):
        return None
    if not _REFUSED.search(text) or _OTHER.search(text):
        return None
    at = event.get("lastTimestamp") or event.get("eventTime") or ""
    series = (event.get("series") or {}).get("lastObservedTime")
    found = _POD.search(text)
    reason = clean(text[found.end() :] if found else text, MAX_REASON)
    uid = str(about.get("uid") or "")
    owner = clean(f"{about.get('kind')} {about.get('name')}", 253)
    # A denial may hold the pod's generated name.
    plain = re.sub(r'"[^"]*-[^"]*"', '""', reason)
    return RefusedCreation(owner, reason, str(series or at), f"{uid[:36]}/{digest(plain)}", node)


def kind_of(event: Object) -> Kind | None:
    """Return the kind of the owner that an Event is about; None if its pods are not known."""
    about = event.get("involvedObject") or {}
    return OWNERS.get((str(about.get("apiVersion")), str(about.get("kind"))))


def by_supervisor(
    refused: RefusedCreation, owner: Object, policy: SupervisionPolicy, images: Images
) -> RefusedCreation | None:
    """Return ``refused`` if ``policy`` adds a supervisor to the owner's pods, which may be why.

    It is not why if the API server also names other containers, or if a quota has no room for the
    pod without a supervisor either.
    """
    pods = [_pod(template, owner, refused.node) for template in _templates(owner, refused.node)]
    found = (_named(refused, pod, policy, images) for pod in pods)
    return refused if any(found) else None


def _templates(owner: Object, node: str) -> list[Object]:
    """Return the templates by which the owner may have made the pod."""
    spec = owner.get("spec") or {}
    if not node:
        return [spec.get("template") or {}]
    groups = [spec.get("headGroupSpec")] if node == RAY_HEAD else spec.get("workerGroupSpecs") or ()
    return [group.get("template") or {} for group in groups if isinstance(group, dict)]


def _pod(template: Object, owner: Object, node: str) -> Object:
    """Make the pod as its owner does, as far as an injection looks at it."""
    meta, spec = template.get("metadata") or {}, template.get("spec") or {}
    reference = {"apiVersion": owner.get("apiVersion"), "kind": owner.get("kind")}
    reference |= {key: owner["metadata"].get(key) for key in ("name", "uid")}
    made: Object = {"name": "", "ownerReferences": [reference | {"controller": True}]}
    if node:
        own = {RAY_CLUSTER: owner["metadata"].get("name"), RAY_NODE: node}
        made["labels"] = (meta.get("labels") or {}) | own
        spec = spec | {"containers": _with_ray(spec.get("containers") or [])}
    return {"metadata": meta | made, "spec": spec}


def _with_ray(containers: list[Object]) -> list[Object]:
    """Let the first container start Ray, before what its template says, as KubeRay does."""
    if not containers:
        return []
    first, *others = containers
    words = [*(first.get("command") or ()), *(first.get("args") or ())]
    script = "; ".join(filter(None, ["ray start", shlex.join(map(str, words))]))
    return [first | {"command": ["/bin/sh", "-c", "--"], "args": [script]}, *others]


def _named(
    refused: RefusedCreation, pod: Object, policy: SupervisionPolicy, images: Images
) -> bool:
    """Whether ``pod`` is of ``policy``, and nothing else of it than a supervisor may be why."""
    if not policy.spec.selector.matches(pod["metadata"].get("labels") or {}):
        return False
    admitted = admit(pod, policy, images)
    if admitted.refusal is not None:
        return False
    before = {one.get("name") for one in every_container(pod["spec"])}
    added = [one for one in every_container(admitted.pod["spec"]) if one.get("name") not in before]
    names = {str(one["name"]) for one in added}
    reason = refused.reason
    if quota := _QUOTA.search(reason):
        return _fits_without(quota, added)
    named = {
        name
        for groups in _CONTAINERS.findall(reason)
        for quoted, listed in _QUOTED.findall(" ".join(groups))
        for name in (quoted or listed).split(",")
    }
    return named <= names


def _fits_without(quota: re.Match[str], added: list[Object]) -> bool:
    """Whether the quota would have had room for the pod without the ``added`` containers."""
    wanted, taken, limits = map(_amounts, quota.groups())
    stays = [one for one in added if one.get("restartPolicy") == "Always"]
    for name, amount in wanted.items():
        own = sum((_share(one, name) for one in stays), Fraction(0))
        if amount - own > limits.get(name, Fraction(0)) - taken.get(name, Fraction(0)):
            return False
    return True


def _share(container: Object, counted: str) -> Fraction:
    """Return what a container takes of a resource as a quota names it, such as ``limits.cpu``."""
    kind, dot, name = counted.partition(".")
    held = container.get("resources") or {}
    amounts: Mapping[str, str] = held.get(kind if dot else "requests") or {}
    return quantity(str(amounts.get(name if dot else kind, "0")))


def _amounts(text: str) -> dict[str, Fraction]:
    """Read ``limits.cpu=1,memory=2Gi``; what is no amount counts as nothing."""
    found = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            found[name] = Fraction(quantity(amount))
        except ValueError:
            found[name] = Fraction(0)
    return found
