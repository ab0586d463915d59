"""``plimsoll doctor``: check everything that supervision needs, with one line per check."""

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
from plimsoll_api.workloads import find_membership
from plimsoll_cli.cluster import checks
from plimsoll_cli.cluster.checks import Check
from plimsoll_cli.cluster.client import Cluster, Object
from plimsoll_cli.cluster.supervised import (
    CORE_API_PATH,
    has_ended,
    is_supervised,
    list_labelled_pods,
)
from plimsoll_cli.errors import RunError, UsageError

MIN_KUBERNETES_MINOR = 34
"""Minor version of the oldest supported Kubernetes release; 1.33 rejects the CRDs, because of
the estimated cost of their CEL rules."""
MAX_TESTED_KUBERNETES_MINOR = 37
"""Minor version of the newest tested Kubernetes release."""
REQUIRED_PERMISSIONS = (
    ("list", API_GROUP, SERVICES, ""),
    ("list", API_GROUP, INCIDENTS, ""),
    ("list", API_GROUP, POLICIES, ""),
    ("list", "", "pods", ""),
    ("create", "", "pods", "exec"),
)
"""Permissions that the command line needs: verb, group, resource, subresource."""
KSERVE_API_GROUP = "serving.kserve.io"
OPERATOR_LABEL = "app.kubernetes.io/name=plimsoll"
"""Label of the operator's Deployment and its pods."""
UNREADY_TEXTS = {
    UNREADY_MANUAL: "drained by a person",
    UNREADY_DRAIN: "drained for an incident",
    UNREADY_RESTART: "the engine is restarting",
}
MAX_WEBHOOK_TESTS = 8


def run_checks(cluster: Cluster, service: str | None, policy: str | None) -> Iterator[Check]:
    """Yield the results of all checks; those whose failure may explain others come first."""
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
    crds = list(_check_crds(cluster))
    yield from crds
    yield from _check_permissions(cluster)
    yield from _warn_about_kserve(cluster)
    yield from _check_operator(cluster)
    if all(check.ok for check in crds):
        if policy is None:
            yield from _check_services(cluster, service)
        if service is None:
            yield from _check_policies(cluster, policy)
        yield from _check_replicas(cluster, service, policy)


def check_version(host: str, version: Object) -> Check:
    """Check that Plimsoll supports the version of the API server ``host``."""
    minor = int("".join(c for c in str(version["minor"]) if c.isdigit()) or 0)
    text = f"{host}, Kubernetes {version['gitVersion']}"
    if minor < MIN_KUBERNETES_MINOR:
        return Check(
            "api server",
            False,
            f"{text}: Plimsoll needs Kubernetes 1.{MIN_KUBERNETES_MINOR} or later",
        )
    if minor > MAX_TESTED_KUBERNETES_MINOR:
        text += (
            f" (the newest release that Plimsoll is tested with is 1.{MAX_TESTED_KUBERNETES_MINOR})"
        )
    return Check("api server", True, text)


def _check_crds(cluster: Cluster) -> Iterator[Check]:
    for plural in (SERVICES, INCIDENTS, POLICIES):
        name = f"{plural}.{API_GROUP}"
        try:
            group = cluster.get(f"/apis/{API_GROUP}")
            versions = [one["version"] for one in group["versions"]]
            known = (
                cluster.get(f"/apis/{API_GROUP}/{CRD_VERSION}") if CRD_VERSION in versions else {}
            )
        except RunError as error:
            yield Check(name, False, f"{error}: run kubectl apply --server-side -k config")
            continue
        there = plural in [one["name"] for one in known.get("resources", [])]
        text = (
            f"{CRD_VERSION} is served"
            if there
            else f"Plimsoll needs {CRD_VERSION}, but the API server serves {versions}"
        )
        yield Check(name, there, text)


def _check_permissions(cluster: Cluster) -> Iterator[Check]:
    for verb, group, resource, sub in REQUIRED_PERMISSIONS:
        wanted = {"verb": verb, "group": group, "resource": resource, "subresource": sub}
        space = {"namespace": cluster.namespace} if cluster.namespace else {}
        name = f"permission to {verb} {resource}" + (f"/{sub}" if sub else "")
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
        yield Check(
            name,
            allowed,
            "yes" if allowed else f"not allowed; grant it with the rule {rule} verbs: [{verb}]}}",
        )


# kubectl may confuse the ``inferenceservices`` of both.
def _warn_about_kserve(cluster: Cluster) -> Iterator[Check]:
    with contextlib.suppress(RunError):
        cluster.get(f"/apis/{KSERVE_API_GROUP}")
        yield Check(
            "KServe",
            True,
            "KServe also has a kind InferenceService: in kubectl, write plinf or "
            f"{SERVICES}.{API_GROUP}, because {SERVICES} may mean {SERVICES}.{KSERVE_API_GROUP}",
        )


def _check_operator(cluster: Cluster) -> Iterator[Check]:
    query = {"labelSelector": OPERATOR_LABEL}
    try:
        found = cluster.get("/apis/apps/v1/deployments", **query)["items"]
    except RunError as error:
        yield Check("operator", None, str(error).splitlines()[0])
        return
    if not found:
        yield Check(
            "operator",
            False,
            (f"no Deployment has the label {OPERATOR_LABEL}: install the operator with its chart"),
        )
        return
    ready = sum(int(one.get("status", {}).get("readyReplicas") or 0) for one in found)
    images = {c["image"] for one in found for c in one["spec"]["template"]["spec"]["containers"]}
    text = f"{ready} ready, {', '.join(sorted(images))}"
    if not ready:
        for space in sorted({str(one["metadata"]["namespace"]) for one in found}):
            for pod in cluster.list_objects(CORE_API_PATH, "pods", space, **query):
                why = checks.find_not_ready_cause(cluster, pod)
                text += f"; {pod['metadata']['name']}: {why.message}" if why else ""
    yield Check("operator", ready > 0, text)
    yield from checks.check_secret(cluster, found)


def _check_services(cluster: Cluster, service: str | None) -> Iterator[Check]:
    try:
        for one in checks.get_objects(cluster, SERVICES, service):
            yield checks.check_service(one)
            name = f"service {one['metadata']['name']}"
            yield from checks.check_memory_recommendation(name, one.get("status") or {})
    except RunError as error:
        yield Check(f"service {service or ''}".strip(), False, str(error).splitlines()[0])


def _check_policies(cluster: Cluster, name: str | None) -> Iterator[Check]:
    try:
        found = checks.get_objects(cluster, POLICIES, name)
    except RunError as error:
        yield Check(f"policy {name or ''}".strip(), False, str(error).splitlines()[0])
        return
    for one in found:
        yield from checks.check_policy(cluster, one)
    if found:
        yield checks.check_certificate(cluster, datetime.datetime.now(datetime.UTC))
    for one in found[:MAX_WEBHOOK_TESTS]:
        yield from checks.check_webhook(cluster, one)


def _check_replicas(cluster: Cluster, service: str | None, policy: str | None) -> Iterator[Check]:
    from plimsoll_cli.actions import get_status
    from plimsoll_cli.cluster.actions import make_supervisor_caller

    drained: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for pod in list_labelled_pods(cluster):
        labels = pod["metadata"]["labels"]
        wanted = (service, labels.get(SERVICE_LABEL)), (policy, labels.get(POLICY_LABEL))
        if any(name not in (None, found) for name, found in wanted):
            continue
        name = str(pod["metadata"]["name"])
        if has_ended(pod):
            continue
        trouble = _describe_supervisor_problem(cluster, pod)
        if trouble is not None:
            yield Check(name, False, trouble)
            continue
        try:
            seen = get_status(
                make_supervisor_caller(cluster, name, pod["metadata"]["namespace"]), name
            )
        except RunError as error:
            yield Check(name, False, str(error).splitlines()[0])
            continue
        if seen.epoch is None:
            yield Check(name, False, f"the supervisor cannot observe its engine: {seen.message}")
        else:
            yield Check(
                name,
                bool(seen.host_memory),
                format_out_of_service_reasons(name, seen) + _format_observation(seen),
            )
            if "metrics" in seen.unseen:
                yield Check(f"{name} metrics", False, seen.unseen["metrics"])
            yield from check_shared_memory(name, seen)
            yield from (Check(f"{name} budget", False, text) for text in seen.budgets)
        owner = find_membership(pod["metadata"]).workload or name
        named = f"service {labels[SERVICE_LABEL]}" if SERVICE_LABEL in labels else str(owner)
        drained[pod["metadata"]["namespace"], named].append(UNREADY_MANUAL in seen.out_of_service)
    for (_, named), pods in sorted(drained.items()):
        if all(pods):
            text = (
                f"all {len(pods)} pods were drained by a person: to put a pod back into service,"
                " run plimsoll resume POD"
            )
            yield Check(f"{named} drained", False, text)


def format_out_of_service_reasons(pod: str, answer: ActionAnswer) -> str:
    """Return why the supervisor keeps its pod unready; empty if it does not."""
    if not answer.out_of_service:
        return ""
    reasons = ", ".join(
        f"{UNREADY_TEXTS[reason]} (until you run plimsoll resume {pod})"
        if reason == UNREADY_MANUAL
        else f"{UNREADY_TEXTS[reason]} (for at most {left_s / 60:.0f} min more)"
        for reason, left_s in answer.out_of_service.items()
        if reason in UNREADY_TEXTS
    )
    return f"out of service: {reasons}; "


def _format_observation(answer: ActionAnswer) -> str:
    host = (
        f"host memory from {answer.host_memory}"
        if answer.host_memory
        else (
            "host memory cannot be read (set shareProcessNamespace, and run both containers as"
            " the same user)"
        )
    )
    device = (
        f"device memory from {answer.device_memory}" if answer.device_memory else "no device memory"
    )
    device += f" ({'; '.join(answer.device_reasons or [answer.nvml])})"
    return (
        f"engine {answer.version} {answer.state}, epoch {answer.epoch}; "
        f"supervisor {answer.supervisor}; observes {host}, {device}; "
        f"supports {', '.join(sorted(answer.capabilities))}"
    )


def check_shared_memory(name: str, answer: ActionAnswer) -> Iterator[Check]:
    """Report the size of the files in ``/dev/shm`` that no process uses, if it is known."""
    if answer.shared_memory_error:
        yield Check(f"{name} /dev/shm", None, f"unknown: {answer.shared_memory_error}")
    elif answer.shared_orphan is not None:
        size = format_bytes(answer.shared_orphan)
        yield Check(f"{name} /dev/shm", True, f"{size} in /dev/shm belong to no running process")


# None if the supervisor can observe its engine.
def _describe_supervisor_problem(cluster: Cluster, pod: Object) -> str | None:
    if not is_supervised(pod):
        return "the pod has no supervisor: add one with a SupervisionPolicy or plimsoll inject"
    if not pod["spec"].get("shareProcessNamespace"):
        return "the supervisor cannot see the engine's processes: set shareProcessNamespace: true"
    phase = (pod.get("status") or {}).get("phase")
    why = checks.find_not_ready_cause(cluster, pod)
    if phase != "Running":
        return f"the pod is {phase}" + (f": {why.message}" if why else "")
    return why.message if why is not None and why.blocking else None
