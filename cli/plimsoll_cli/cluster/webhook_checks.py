"""What ``plimsoll doctor`` says of the admission webhook: its certificate, and whether it answers.

Whether it answers, only the API server can say: a pod is created in a dry run, which asks the
webhook and stores nothing.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import secrets
from collections.abc import Iterator

from cryptography import x509
from pydantic import ValidationError

from plimsoll_api.label_selector import LabelSelector, Operator
from plimsoll_api.names import POLICY_LABEL, REFUSED
from plimsoll_cli.cluster.check import Check
from plimsoll_cli.cluster.client import Cluster, Object
from plimsoll_cli.cluster.supervised import supervised
from plimsoll_cli.errors import RunError

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
SUFFIX = ".pods.plimsoll.dev"
"""Of the names of our webhooks."""
LEAST_LEFT = datetime.timedelta(days=20)
"""The operator renews a certificate 30 days before it expires."""
INSTALL = "install the chart with --set webhook.enabled=true"


def certificate(cluster: Cluster, now: datetime.datetime) -> Check:
    """Check the newest certificate that the API server trusts for the webhook."""
    name = "webhook certificate"
    try:
        found = cluster.get(CONFIGURATIONS)["items"]
    except RunError as error:
        return Check(name, None, str(error).splitlines()[0])
    webhooks = [hook for one in found for hook in one.get("webhooks") or ()]
    ours = [hook for hook in webhooks if str(hook.get("name", "")).endswith(SUFFIX)]
    if not ours:
        text = f"no webhook is configured, so new pods get no supervisor: {INSTALL}"
        return Check(name, False, text)
    bundle = (ours[0].get("clientConfig") or {}).get("caBundle", "")
    return of_bundle(bundle, now)


def of_bundle(bundle: str, now: datetime.datetime) -> Check:
    """Check when the newest certificate in a webhook's ``caBundle`` expires."""
    name = "webhook certificate"
    try:
        read = x509.load_pem_x509_certificates(base64.b64decode(bundle, validate=True))
    except (ValueError, binascii.Error):
        return Check(
            name, False, "the webhook's caBundle holds no certificate: restart the operator"
        )
    newest = max(read, key=lambda one: one.not_valid_after_utc)
    made, ends = newest.not_valid_before_utc, newest.not_valid_after_utc
    left = ends - now
    text = f"made {(now - made).days} days ago, expires {ends:%Y-%m-%d}"
    if left <= datetime.timedelta():
        return Check(name, False, f"{text}: expired, so new pods get no supervisor")
    if left < LEAST_LEFT:
        text += f", in {left.days} days: it should have been renewed; read the operator's log"
        return Check(name, False, text)
    return Check(name, True, text)


def answers(cluster: Cluster, policy: Object) -> Iterator[Check]:
    """Whether a new pod that ``policy`` selects would get a supervisor."""
    meta = policy["metadata"]
    name = f"webhook for policy {meta['name']}"
    pod = trial(policy)
    if pod is None:
        yield Check(name, None, "no pod for a trial could be made from spec.selector")
        return
    path = f"/api/v1/namespaces/{meta['namespace']}/pods"
    try:
        made = cluster.create(path, pod, dryRun="All", fieldValidation="Ignore")
    except RunError as error:
        yield Check(name, None, f"no trial: {str(error).splitlines()[0]}")
        return
    yield of_trial(name, made, str(meta["name"]))


def of_trial(name: str, made: Object, policy: str) -> Check:
    """Check what admission did to the pod of the trial."""
    meta = made["metadata"]
    owner = (meta.get("labels") or {}).get(POLICY_LABEL)
    refusal = (meta.get("annotations") or {}).get(REFUSED)
    if supervised(made) and owner == policy:
        return Check(name, True, "a new pod gets a supervisor (dry run)")
    if supervised(made):
        text = f"policy {owner}, which is older, supervises such pods: narrow one of the selectors"
        return Check(name, False, text)
    if refusal is not None:
        return Check(name, True, f"it answers, and refuses the pod of the trial: {refusal}")
    text = (
        "a new pod gets no supervisor (dry run): the webhook does not answer, or does not know the"
        " policy yet: check that the operator runs with its webhook, and that the API server"
        " reaches its Service"
    )
    return Check(name, False, text)


def trial(policy: Object) -> Object | None:
    """Make a pod that ``policy`` selects and can supervise; None if the selector leaves it open.

    It meets the restricted pod security standard.
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
