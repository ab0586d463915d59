"""``plimsoll doctor``: checks of everything that supervision needs, one line each."""

from __future__ import annotations

import contextlib
import datetime
from collections import defaultdict
from collections.abc import Iterator

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_api.names import (
    API_GROUP,
    CRD_VERSION,
    POLICY_LABEL,
    SERVICE_LABEL,
    UNREADY_DRAIN,
    UNREADY_MANUAL,
    UNREADY_RESTART,
)
from plimsoll_api.names import INCIDENT_PLURAL as INCIDENTS
from plimsoll_api.names import POLICY_PLURAL as POLICIES
from plimsoll_api.names import SERVICE_PLURAL as SERVICES
from plimsoll_api.units import format_bytes
from plimsoll_api.workloads import membership
from plimsoll_cli.cluster import checks
from plimsoll_cli.cluster.checks import Check
from plimsoll_cli.cluster.client import Cluster, Object
from plimsoll_cli.cluster.supervised import CORE, has_ended, is_supervised, list_labelled_pods
from plimsoll_cli.errors import RunError, UsageError

MIN_MINOR = 34
"""Oldest tested Kubernetes release. Native sidecars are stable since 1.33, whose support ended on
2026-06-28 (https://kubernetes.io/releases/1.33/)."""
MAX_TESTED_MINOR = 37
"""Newest tested Kubernetes release."""
REQUIRED_PERMISSIONS = (
    ("list", API_GROUP, SERVICES, ""),
    ("list", API_GROUP, INCIDENTS, ""),
    ("list", API_GROUP, POLICIES, ""),
    ("list", "", "pods", ""),
    ("create", "", "pods", "exec"),
)
"""Permissions that the command line needs: verb, group, resource, subresource."""
KSERVE = "serving.kserve.io"
OPERATOR_LABEL = "app.kubernetes.io/name=plimsoll"
"""Label of the chart's Deployment and its pods."""
UNREADY = {
    UNREADY_MANUAL: "a person drained it",
    UNREADY_DRAIN: "an incident drains it",
    UNREADY_RESTART: "its engine restarts",
}
MAX_TRIALS = 8
"""Maximum number of policies whose webhook is tested."""


def run(cluster: Cluster, service: str | None, policy: str | None) -> Iterator[Check]:
    """Yield all checks, ordered so that a failure explains later ones."""
    try:
        yield check_version(cluster.host, cluster.get("/version"))
    except RunError as error:
        yield Check("api server", False, str(error))
        return
    try:
        cluster.check_namespace()
    except UsageError as error:
        yield Check("namespace", False, str(error))
        return
    crds = list(_crds(cluster))
    yield from crds
    yield from _permissions(cluster)
    yield from _kserve(cluster)
    yield from _operator(cluster)
    if all(check.ok for check in crds):
        if policy is None:
            yield from _services(cluster, service)
        if service is None:
            yield from _policies(cluster, policy)
        yield from _replicas(cluster, service, policy)


def check_version(host: str, found: Object) -> Check:
    """Return the check of the API server's version."""
    minor = int("".join(c for c in str(found["minor"]) if c.isdigit()) or 0)
    text = f"{host}, Kubernetes {found['gitVersion']}"
    if minor < MIN_MINOR:
        return Check("api server", False, f"{text}: Plimsoll needs at least 1.{MIN_MINOR}")
    if minor > MAX_TESTED_MINOR:
        text += f" (the newest tested release is 1.{MAX_TESTED_MINOR})"
    return Check("api server", True, text)


def _crds(cluster: Cluster) -> Iterator[Check]:
    for plural in (SERVICES, INCIDENTS, POLICIES):
        name = f"{plural}.{API_GROUP}"
        try:
            group = cluster.get(f"/apis/{API_GROUP}")
            versions = [one["version"] for one in group["versions"]]
            known = (
                cluster.get(f"/apis/{API_GROUP}/{CRD_VERSION}") if CRD_VERSION in versions else {}
            )
        except RunError as error:
            yield Check(name, False, f"{error}: kubectl apply --server-side -k config")
            continue
        there = plural in [one["name"] for one in known.get("resources", [])]
        text = (
            f"{CRD_VERSION} is served"
            if there
            else f"Plimsoll needs {CRD_VERSION}, but the API server serves {versions}"
        )
        yield Check(name, there, text)


def _permissions(cluster: Cluster) -> Iterator[Check]:
    for verb, group, resource, sub in REQUIRED_PERMISSIONS:
        wanted = {"verb": verb, "group": group, "resource": resource, "subresource": sub}
        space = {"namespace": cluster.namespace} if cluster.namespace else {}
        name = f"may {verb} {resource}" + (f"/{sub}" if sub else "")
        try:
            answer = cluster.create(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                {
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": wanted | space},
                },
            )
        except RunError as error:
            yield Check(name, None, str(error))
            continue
        allowed = bool(answer["status"]["allowed"])
        rule = f"{{apiGroups: ['{group}'], resources: [{resource}{'/' + sub if sub else ''}],"
        yield Check(name, allowed, "yes" if allowed else f"no: {rule} verbs: [{verb}]}}")


def _kserve(cluster: Cluster) -> Iterator[Check]:
    """Yield a check if kubectl may confuse ``inferenceservices`` with KServe's kind."""
    with contextlib.suppress(RunError):
        cluster.get(f"/apis/{KSERVE}")
        yield Check(
            "KServe",
            True,
            f"it has a kind InferenceService as well: use plinf or {SERVICES}.{API_GROUP},"
            f" because {SERVICES} may mean {SERVICES}.{KSERVE} in kubectl",
        )


def _operator(cluster: Cluster) -> Iterator[Check]:
    query = {"labelSelector": OPERATOR_LABEL}
    try:
        found = cluster.get("/apis/apps/v1/deployments", **query)["items"]
    except RunError as error:
        yield Check("operator", None, str(error).splitlines()[0])
        return
    if not found:
        yield Check("operator", False, f"no Deployment has the label {OPERATOR_LABEL}")
        return
    ready = sum(int(one.get("status", {}).get("readyReplicas") or 0) for one in found)
    images = {c["image"] for one in found for c in one["spec"]["template"]["spec"]["containers"]}
    text = f"{ready} ready, {', '.join(sorted(images))}"
    if not ready:
        for space in sorted({str(one["metadata"]["namespace"]) for one in found}):
            for pod in cluster.list_objects(CORE, "pods", space, **query):
                why = checks.first_cause(cluster, pod)
                text += f"; {pod['metadata']['name']}: {why.message}" if why else ""
    yield Check("operator", ready > 0, text)
    yield from checks.check_secret(cluster, found)


def _services(cluster: Cluster, service: str | None) -> Iterator[Check]:
    """Yield the checks of services, from the operator's conditions."""
    try:
        for one in checks.get_or_list(cluster, SERVICES, service):
            yield checks.check_service(one)
            name = f"service {one['metadata']['name']}"
            yield from checks.check_memory(name, one.get("status") or {})
    except RunError as error:
        yield Check(f"service {service or ''}".strip(), False, str(error).splitlines()[0])


def _policies(cluster: Cluster, name: str | None) -> Iterator[Check]:
    """Yield the checks of policies and of their webhook."""
    try:
        found = checks.get_or_list(cluster, POLICIES, name)
    except RunError as error:
        yield Check(f"policy {name or ''}".strip(), False, str(error).splitlines()[0])
        return
    for one in found:
        yield from checks.check_policy(cluster, one)
    if found:
        yield checks.check_certificate(cluster, datetime.datetime.now(datetime.UTC))
    for one in found[:MAX_TRIALS]:
        yield from checks.check_webhook(cluster, one)


def _replicas(cluster: Cluster, service: str | None, policy: str | None) -> Iterator[Check]:
    """Yield a check per supervisor, and one if all pods are drained."""
    from plimsoll_cli.actions import status
    from plimsoll_cli.cluster.actions import supervisor_caller

    drained: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for pod in list_labelled_pods(cluster):
        labels = pod["metadata"]["labels"]
        wanted = (service, labels.get(SERVICE_LABEL)), (policy, labels.get(POLICY_LABEL))
        if any(name not in (None, found) for name, found in wanted):
            continue
        name = str(pod["metadata"]["name"])
        if has_ended(pod):
            continue
        trouble = _sidecar(cluster, pod)
        if trouble is not None:
            yield Check(name, False, trouble)
            continue
        try:
            seen = status(supervisor_caller(cluster, name, pod["metadata"]["namespace"]), name)
        except RunError as error:
            yield Check(name, False, str(error).splitlines()[0])
            continue
        if seen.epoch is None:
            yield Check(name, False, f"the supervisor cannot observe its engine: {seen.message}")
        else:
            yield Check(
                name,
                bool(seen.host_memory),
                out_of_service_text(name, seen) + _observation_text(seen),
            )
            if "metrics" in seen.unseen:
                yield Check(f"{name} metrics", False, seen.unseen["metrics"])
            yield from check_shared_memory(name, seen)
            yield from (Check(f"{name} budget", False, text) for text in seen.budgets)
        owner = membership(pod["metadata"]).workload or name
        named = f"service {labels[SERVICE_LABEL]}" if SERVICE_LABEL in labels else str(owner)
        drained[pod["metadata"]["namespace"], named].append(UNREADY_MANUAL in seen.out_of_service)
    for (_, named), pods in sorted(drained.items()):
        if all(pods):
            text = f"all {len(pods)} pods were drained manually: run plimsoll resume POD"
            yield Check(f"{named} drained", False, text)


def out_of_service_text(pod: str, seen: ActionAnswer) -> str:
    """Return why the supervisor keeps its pod unready, or ""."""
    if not seen.out_of_service:
        return ""
    reasons = ", ".join(
        f"{UNREADY[reason]} (until plimsoll resume {pod})"
        if reason == UNREADY_MANUAL
        else f"{UNREADY[reason]} (at most {left_s / 60:.0f} min more)"
        for reason, left_s in seen.out_of_service.items()
        if reason in UNREADY
    )
    return f"out of service: {reasons}; "


def _observation_text(seen: ActionAnswer) -> str:
    """Return what a supervisor observes, and what its engine supports."""
    host = (
        f"host memory by {seen.host_memory}"
        if seen.host_memory
        else (
            "cannot see host memory (set shareProcessNamespace, and run both containers as the"
            " same user)"
        )
    )
    device = f"device memory by {seen.device_memory}" if seen.device_memory else "no device memory"
    device += f" ({'; '.join(seen.device_reasons or [seen.nvml])})"
    return (
        f"engine {seen.version} {seen.state}, epoch {seen.epoch}; supervisor {seen.supervisor};"
        f" {host}; {device}; can {', '.join(sorted(seen.capabilities))}"
    )


def check_shared_memory(name: str, seen: ActionAnswer) -> Iterator[Check]:
    """Yield the check of memory in ``/dev/shm`` that no process uses.

    Yields nothing if the pod has no volume there, because the supervisor cannot watch it.
    """
    if seen.shared_memory_error:
        yield Check(f"{name} /dev/shm", None, f"unknown: {seen.shared_memory_error}")
    elif seen.shared_orphan is not None:
        size = format_bytes(seen.shared_orphan)
        yield Check(f"{name} /dev/shm", True, f"{size} used by no process")


def _sidecar(cluster: Cluster, pod: Object) -> str | None:
    """Return why the supervisor of this pod cannot observe its engine, or None."""
    if not is_supervised(pod):
        return "the pod has no supervisor: a SupervisionPolicy or plimsoll inject adds one"
    if not pod["spec"].get("shareProcessNamespace"):
        return "shareProcessNamespace is not true: the supervisor cannot see the engine's processes"
    phase = (pod.get("status") or {}).get("phase")
    why = checks.first_cause(cluster, pod)
    if phase != "Running":
        return f"the pod is {phase}" + (f": {why.message}" if why else "")
    return why.message if why is not None and why.blocking else None
