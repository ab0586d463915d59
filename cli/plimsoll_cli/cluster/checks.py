"""Checks of ``plimsoll doctor`` on services, policies and the webhook.

The webhook is tested with a dry run that creates a pod and stores nothing.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cryptography import x509
from pydantic import ValidationError

from plimsoll_api.label_selector import LabelSelector, Operator
from plimsoll_api.names import POLICY_LABEL, REFUSED_ANNOTATION
from plimsoll_api.times import format_rfc3339
from plimsoll_api.workloads import find_membership
from plimsoll_cli.cluster.client import Cluster, NotFoundError, Object
from plimsoll_cli.cluster.supervised import (
    CORE_API_PATH,
    has_ended,
    is_supervised,
    list_policy_pods,
)
from plimsoll_cli.errors import RunError
from plimsoll_operator.fleet.pods import Cause, PodView

MAX_LISTED_WORKLOADS = 4
"""Maximum number of workloads in a line, and of pods of each workload."""
RESTARTABLE_KINDS = ("Deployment", "StatefulSet", "DaemonSet")
"""Kinds that ``kubectl rollout restart`` supports."""
WEBHOOK_CONFIGURATIONS_PATH = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
WEBHOOK_NAME_SUFFIX = ".pods.plimsoll.dev"
CERTIFICATE_SECRET_KEYS = "tls.crt", "tls.key", "ca.crt"
PROBLEM_CONDITIONS = {
    "Ready": "False", "EngineReady": "False", "SupervisorReady": "False", "Stalled": "True",
    "CrashLooping": "True", "RestartBudgetExhausted": "True", "SuspectRevision": "True",
    "ObjectsComplete": "False",
}  # fmt: skip
"""Conditions of an InferenceService, with the status that indicates a problem."""
MIN_REMAINING_VALIDITY = datetime.timedelta(days=20)
"""Remaining validity of a certificate below which its renewal is overdue."""
INSTALL_WEBHOOK_HINT = "install the chart with --set webhook.enabled=true"


@dataclass(frozen=True)
class Check:
    """Result of one check, printed as a line; ``ok`` is None if the check could not be made."""

    name: str
    ok: bool | None
    text: str


def get_objects(cluster: Cluster, plural: str, name: str | None) -> list[Object]:
    """Return the object ``name`` of a Plimsoll kind, or all objects without a name.

    Raises RunError, also if the object does not exist.
    """
    if name is None:
        return list(cluster.list_custom_objects(plural))
    found = cluster.get_custom_object(plural, name)
    if found is None:
        raise RunError(
            f"does not exist in namespace {cluster.namespace or 'default'}: check the name and "
            "-n; see: plimsoll top -A"
        )
    return [found]


def check_service(service: Object) -> Check:
    """Check the conditions of an InferenceService; the result lists all problems."""
    name = f"service {service['metadata']['name']}"
    found, unread = _read_conditions(service)
    if unread:
        return Check(name, None, unread)
    wrong: list[str] = []
    for type_, bad in PROBLEM_CONDITIONS.items():
        one = found.get(type_) or {}
        text = f"{one.get('reason')}: {one.get('message')}"
        if one.get("status") == bad and one.get("reason") != "ContainersNotReady":
            # The message of Stalled already contains those of Ready and EngineReady.
            wrong += [] if any(str(one.get("message")) in said for said in wrong) else [text]
    ready = found["Ready"]
    return Check(name, not wrong, "; ".join(wrong) or f"{ready.get('reason')}: {ready['message']}")


def check_memory_recommendation(name: str, status: Object) -> Iterator[Check]:
    """Compare the memory request and limit with the recommendation in ``status``, if any."""
    recommendation = status.get("recommendation") or {}
    if not recommendation:
        return
    text, resources = str(recommendation.get("message")), recommendation.get("resources") or {}
    fits = "too small" not in text
    if resources and not fits:
        amounts = (f"{key}.memory: {resources[key]['memory']}" for key in ("requests", "limits"))
        text += f"; set {', '.join(amounts)}"
    yield Check(f"{name} memory", fits, text)


def _read_conditions(item: Object) -> tuple[dict[str, Object], str]:
    """Return the conditions by type, and a message if they are outdated, otherwise ""."""
    meta, status = item["metadata"], item.get("status") or {}
    found = {str(one["type"]): one for one in status.get("conditions") or ()}
    if "Ready" in found and status.get("observedGeneration") == meta.get("generation"):
        return found, ""
    return found, "the operator has not processed the current spec: check that the operator runs"


def find_not_ready_cause(cluster: Cluster, pod: Object) -> Cause | None:
    """Return why ``pod`` is not ready; None if no cause is known.

    A cause that needs a person's action takes precedence.
    """
    meta, spec, events = pod["metadata"], pod["spec"], list[Object]()
    view = PodView.parse(pod)
    if view.is_creating:
        query = {"fieldSelector": f"involvedObject.name={meta['name']}"}
        with contextlib.suppress(
            RunError
        ):  # without permission to read Events, judge by the containers alone
            events = list(
                cluster.list_objects(CORE_API_PATH, "events", str(meta["namespace"]), **query)
            )
    sidecars = [
        one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"
    ]
    now = format_rfc3339(time.time())
    found = []
    for one in [*sidecars, *spec["containers"]]:
        why = view.find_cause(one["name"], events, now)
        if why is not None:
            prefix = (
                f"{one['name']}: " if view.containers else ""
            )  # no container: the cause affects the whole pod
            found.append(Cause(why.reason, f"{prefix}{why.message}", why.blocking))
    return min(found, key=lambda one: not one.blocking, default=None)


def check_policy(cluster: Cluster, policy: Object) -> Iterator[Check]:
    """Check a policy's status, and whether selected pods still lack a supervisor."""
    name = f"policy {policy['metadata']['name']}"
    yield from check_policy_status(policy)
    try:
        pods = list_policy_pods(cluster, policy)
    except RunError as error:
        yield Check(name, None, str(error).splitlines()[0])
        return
    waiting = [
        one
        for one in pods
        if not is_supervised(one) and not _has_refusal(one) and not has_ended(one)
    ]
    if waiting:
        yield Check(f"{name} waiting", False, f"recreate {_format_pods_by_workload(waiting)}")


def check_policy_status(policy: Object) -> Iterator[Check]:
    """Check the conditions, the number of supervised pods and the refusals of a policy."""
    name, status = f"policy {policy['metadata']['name']}", policy.get("status") or {}
    found, unread = _read_conditions(policy)
    if unread:
        yield Check(name, None, unread)
        return
    ready = found["Ready"]
    supervised_all = status.get("supervised") == status.get("selected") != 0
    is_ready = ready.get("status") == "True"
    text = f"{ready.get('reason')}: {ready.get('message')}"
    if is_ready and status.get("selected") == 0:
        text += ": compare spec.selector with the labels of the pods"
    yield Check(name, is_ready and supervised_all, text)
    for one in status.get("refusals") or ():
        yield Check(f"{name} refused", False, f"pod {one['pod']}: {one['reason']}")
    injection = found.get("InjectionStopped") or {}
    if injection.get("status") == "True" or injection.get("reason") == "PodDoesNotStart":
        yield Check(f"{name} injection", False, str(injection.get("message")))
    conflict = found.get("Conflicting") or {}
    if conflict.get("status") == "True":
        text = f"{conflict.get('message')}: narrow the selector of one policy"
        yield Check(f"{name} conflict", False, text)
    for one in status.get("workloads") or ():
        yield from check_memory_recommendation(f"{name} {one.get('name', 'pods')}", one)


def _format_pods_by_workload(pods: Sequence[Object]) -> str:
    held = defaultdict(list)
    for pod in pods:
        held[find_membership(pod["metadata"]).workload].append(str(pod["metadata"]["name"]))
    parts = []
    for workload, names in held.items():
        shown = ", ".join(sorted(names)[:MAX_LISTED_WORKLOADS]) + (
            ", ..." if len(names) > MAX_LISTED_WORKLOADS else ""
        )
        if workload is None:
            parts.append(f"{shown} (no workload recreates them: delete and create them yourself)")
        elif workload.kind in RESTARTABLE_KINDS:
            command = f"kubectl rollout restart {workload.kind.lower()}/{workload.name}"
            parts.append(f"{shown}: {command}")
        else:
            parts.append(f"{shown} of {workload.kind} {workload.name}")
    more = len(parts) - MAX_LISTED_WORKLOADS
    return "; ".join(parts[:MAX_LISTED_WORKLOADS]) + (
        f"; and pods of {more} more workloads" if more > 0 else ""
    )


def _has_refusal(pod: Object) -> bool:
    return REFUSED_ANNOTATION in (pod["metadata"].get("annotations") or {})


def check_secret(cluster: Cluster, deployments: Sequence[Object]) -> Iterator[Check]:
    """Check the Secret with the webhook's certificate."""
    containers = [c for one in deployments for c in one["spec"]["template"]["spec"]["containers"]]
    arguments = [argument for one in containers for argument in one.get("args") or ()]
    for given in sorted({one for one in arguments if one.startswith("--webhook=")}):
        namespace, _, name = given.partition("=")[2].partition("/")
        where = f"Secret {namespace}/{name}"
        try:
            found = cluster.get(f"{CORE_API_PATH}/namespaces/{namespace}/secrets/{name}")
        except NotFoundError:
            text = (
                f"{where} does not exist, so that new pods get no supervisor: run helm upgrade"
                " again"
            )
            yield Check("webhook secret", False, text)
        except RunError as error:
            yield Check("webhook secret", None, f"{where}: {str(error).splitlines()[0]}")
        else:
            missing = [
                key for key in CERTIFICATE_SECRET_KEYS if not (found.get("data") or {}).get(key)
            ]
            text = f"{where} has {', '.join(CERTIFICATE_SECRET_KEYS)}"
            if missing:
                text = (
                    f"{where} has no {', '.join(missing)}, so that new pods get no supervisor:"
                    " with cert-manager, use an issuer that writes ca.crt (ACME issuers do not);"
                    " otherwise, read the operator's log"
                )
            yield Check("webhook secret", not missing, text)


def check_certificate(cluster: Cluster, now: datetime.datetime) -> Check:
    """Check the expiry of the certificate that the API server trusts for the webhook."""
    name = "webhook certificate"
    try:
        found = cluster.get(WEBHOOK_CONFIGURATIONS_PATH)["items"]
    except RunError as error:
        return Check(name, None, str(error).splitlines()[0])
    webhooks = [hook for one in found for hook in one.get("webhooks") or ()]
    ours = [hook for hook in webhooks if str(hook.get("name", "")).endswith(WEBHOOK_NAME_SUFFIX)]
    if not ours:
        text = (
            f"no webhook is configured, so that new pods get no supervisor: {INSTALL_WEBHOOK_HINT}"
        )
        return Check(name, False, text)
    bundle = (ours[0].get("clientConfig") or {}).get("caBundle", "")
    return check_certificate_bundle(bundle, now)


def check_certificate_bundle(bundle: str, now: datetime.datetime) -> Check:
    """Check the expiry of the newest certificate in ``bundle``, the value of a ``caBundle``."""
    name = "webhook certificate"
    try:
        read = x509.load_pem_x509_certificates(base64.b64decode(bundle, validate=True))
    except (ValueError, binascii.Error):
        return Check(
            name, False, "the webhook's caBundle contains no certificate: restart the operator"
        )
    newest = max(read, key=lambda one: one.not_valid_after_utc)
    made, ends = newest.not_valid_before_utc, newest.not_valid_after_utc
    left = ends - now
    text = f"issued {(now - made).days} days ago, expires on {ends:%Y-%m-%d}"
    if left <= datetime.timedelta():
        return Check(
            name,
            False,
            (
                f"{text}: the certificate has expired, so that new pods get no supervisor: read"
                " the operator's log"
            ),
        )
    if left < MIN_REMAINING_VALIDITY:
        text += f", in {left.days} days: its renewal is overdue: read the operator's log"
        return Check(name, False, text)
    return Check(name, True, text)


def check_webhook(cluster: Cluster, policy: Object) -> Iterator[Check]:
    """Check whether a new pod that ``policy`` selects would get a supervisor."""
    meta = policy["metadata"]
    name = f"webhook for policy {meta['name']}"
    if ((policy.get("status") or {}).get("injection") or {}).get("stopped"):
        return  # it gets no supervisor; the check of the policy explains why
    pod = make_test_pod(policy)
    if pod is None:
        yield Check(
            name,
            None,
            (
                "the webhook cannot be tested: spec.selector does not determine the labels of a"
                " test pod"
            ),
        )
        return
    path = f"/api/v1/namespaces/{meta['namespace']}/pods"
    try:
        made = cluster.create(path, pod, dryRun="All", fieldValidation="Ignore")
    except RunError as error:
        yield Check(name, None, f"cannot create the test pod: {str(error).splitlines()[0]}")
        return
    yield check_admission(name, made, str(meta["name"]))


def check_admission(name: str, created_pod: Object, policy: str) -> Check:
    """Check whether admission added the supervisor of ``policy`` to the test pod."""
    meta = created_pod["metadata"]
    owner = (meta.get("labels") or {}).get(POLICY_LABEL)
    refusal = (meta.get("annotations") or {}).get(REFUSED_ANNOTATION)
    if is_supervised(created_pod) and owner == policy:
        return Check(name, True, "a new pod gets a supervisor (dry run)")
    if is_supervised(created_pod):
        text = f"the older policy {owner} supervises these pods: narrow the selector of one policy"
        return Check(name, False, text)
    if refusal is not None:
        return Check(name, True, f"the webhook refused the test pod: {refusal}")
    text = (
        "a new pod gets no supervisor (dry run): either the webhook does not answer, or it has not"
        " read the policy yet. Check that the operator runs with its webhook, and that the API"
        " server can reach the webhook's Service"
    )
    return Check(name, False, text)


def make_test_pod(policy: Object) -> Object | None:
    """Return a pod that ``policy`` selects and can supervise, for a dry run.

    Returns None if the policy's selector does not determine the labels of a pod.
    """
    spec = policy.get("spec") or {}
    try:
        selector = LabelSelector.model_validate(spec.get("selector"))
    except ValidationError:
        return None
    labels = dict(selector.match_labels)
    for one in selector.match_expressions:
        if one.operator is Operator.IN:
            labels.setdefault(one.key, one.values[0])
        elif one.operator is Operator.EXISTS:
            labels.setdefault(one.key, "")
    if not selector.matches(labels):
        return None
    engine = spec.get("engine") or {}
    container = {
        "name": engine.get("container") or "engine",
        "image": "vllm/vllm-openai",
        "args": ["serve", "trial"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"plimsoll-doctor-{secrets.token_hex(4)}", "labels": labels},
        "spec": {
            "containers": [container],
            "securityContext": {
                "runAsUser": 65_534,
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        },
    }
