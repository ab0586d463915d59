"""Pods under a policy on a real API server: injected, and created whatever befalls the webhook."""

from __future__ import annotations

import base64
import datetime
import json
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from plimsoll_operator.admission.certificate import (
    Certificate,
    create_ca_certificate,
    create_server_certificate,
)
from plimsoll_operator.injection.policy import inject_pod
from plimsoll_operator.render.containers import Images
from tests.lab.faults import proxied
from tests.lab.kube import Kube
from tests.lab.operator import Operator
from tests.lab.webhook import HOST, NAME, NAMESPACE
from tests.pod_specs import pods, policies

BATCH = 100
SLOW_S = 3.0
"""An answer of the API server that the operator waits this long for; a webhook has 2 s."""
PATIENCE_S = 2.0 + 8.0
"""The webhook's timeout, and what a busy machine takes for the rest."""


def policy(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": "engines"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}} | spec,
    }


def pod(**spec: Any) -> dict[str, Any]:
    restricted = {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    engine = {
        "name": "engine",
        "image": "vllm/vllm-openai:v0.24.0",
        "args": ["serve", "org/model"],
        "securityContext": restricted,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"vllm-{uuid.uuid4().hex[:6]}", "labels": {"app": "vllm"}},
        "spec": {
            "containers": [engine],
            "nodeSelector": {"plimsoll.dev/no-node": "true"},
        }
        | spec,
    }


def created(kubectl: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """The pod as the API server has it; it must be there within the webhook's timeout."""
    began = time.monotonic()
    kubectl.create(wanted)
    found = kubectl.get("pod", wanted["metadata"]["name"])
    assert time.monotonic() - began < PATIENCE_S
    assert isinstance(found, dict)
    return found


def supervised(found: dict[str, Any]) -> bool:
    return any(one["name"] == "supervisor" for one in found["spec"].get("initContainers", ()))


def webhooks(kubectl: Any) -> list[dict[str, Any]]:
    found = kubectl.get("mutatingwebhookconfiguration", NAME) or {}
    return list(found.get("webhooks") or ())


def put(kubectl: Any, namespace: str, found: Certificate) -> None:
    texts = {"tls.crt": found.certificate, "tls.key": found.key, "ca.crt": found.bundle}
    data = {key: base64.b64encode(text).decode() for key, text in texts.items()}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME, "namespace": namespace},
        "data": data,
    }
    kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))


EXPIRY = "plimsoll_operator_webhook_certificate_expiry_timestamp_seconds"


def injects(kubectl: Any) -> bool:
    """Whether a pod is injected by now: API servers take a moment to see a webhook."""
    return supervised(created(kubectl, pod()))


def test_a_pod_under_a_policy_is_injected_and_starts_when_the_operator_is_gone(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    kubectl.apply(policy())
    assert not injects(kubectl), "nobody is asked yet"
    operator = start(*flags)
    eventually(lambda: webhooks(kubectl), 60)
    eventually(lambda: injects(kubectl), 60)

    (asked,) = webhooks(kubectl)
    assert (asked["failurePolicy"], asked["timeoutSeconds"]) == ("Ignore", 2)
    found = created(kubectl, pod())
    assert supervised(found)
    assert found["metadata"]["labels"]["plimsoll.dev/policy"] == "engines"
    volumes = {one["name"]: one for one in found["spec"]["volumes"]}
    assert volumes["plimsoll-config"]["configMap"]["name"] == "engines.policy"
    refused = created(kubectl, pod(containers=[pod()["spec"]["containers"][0] | {"image": "x"}]))
    assert not supervised(refused)
    note = refused["metadata"]["annotations"]["plimsoll.dev/not-supervised"]
    assert note.startswith("no container runs vLLM or SGLang")
    static = pod(nodeName="no-node")
    static["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "ab"}
    assert not supervised(created(kubectl, static)), "the API server admits no token in it"
    unselected = pod()
    unselected["metadata"]["labels"] = {"app": "web"}
    assert not supervised(created(kubectl, unselected))
    assert operator.metric('plimsoll_operator_admissions_total{result="failed"}') == 0
    assert operator.metric('plimsoll_operator_admissions_total{result="injected"}') >= 2

    operator.kill()
    late = created(kubectl, pod())
    assert not supervised(late)
    assert "plimsoll.dev/not-supervised" not in late["metadata"].get("annotations", {})


def test_pods_that_are_rejected_with_a_supervisor_come_without_one(
    kubectl: Any, webhook: Any, start: Callable[..., Any], eventually: Any
) -> None:
    """Quotas, limit ranges and other people's admission count the supervisor, too."""
    kubectl.apply(policy())
    start(*webhook.flags, "--max-waiting-pods=2")
    eventually(lambda: injects(kubectl), 60)
    least = {"type": "Container", "min": {"cpu": "100m"}}
    kubectl.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "least"},
                   "spec": {"limits": [least]}})  # fmt: skip
    spec = pod()["spec"]
    spec["containers"][0]["resources"] = {"requests": {"cpu": "200m"}}
    labels = {"app": "vllm", "of": "deployment"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    wanted = {"selector": {"matchLabels": labels}, "template": template}
    made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}}
    kubectl.apply(made | {"spec": wanted})
    (found,) = eventually(lambda: kubectl.list("pods", "of=deployment"), 60)
    assert not supervised(found)


def test_a_standby_serves_too(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    lease = f"--leader-election={kubectl.namespace}/operator"
    kubectl.apply(policy())
    leader = start(*flags, lease)
    eventually(lambda: injects(kubectl), 60)
    standby = start(*flags, lease)
    assert standby.metric("plimsoll_operator_leader") == 0
    port = int(flags[1].partition("=")[2])
    # Both have the port (SO_REUSEPORT); what answers once the leader is stopped is the other.
    eventually(lambda: "admission webhook listens on port" in standby.log.read_text(), 60)
    leader.kill()
    assert standby.metric("plimsoll_operator_leader") == 0
    with socket.create_connection((HOST, port), timeout=5):
        pass
    assert injects(kubectl)
    assert standby.metric("plimsoll_operator_admissions_total") >= 1


def test_an_expired_certificate_costs_no_pod_and_the_leader_replaces_it(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    kubectl.apply(policy())
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    expired = create_server_certificate(
        HOST, create_ca_certificate(past), past, datetime.timedelta(days=1)
    )
    put(kubectl, NAMESPACE, expired)
    operator = start(*flags, "--webhook-certificate-provided", ready=False)
    eventually(lambda: webhooks(kubectl), 60)
    assert not supervised(created(kubectl, pod())), "the API server does not trust it"
    assert operator.metric(EXPIRY) == expired.expires_at.timestamp()
    assert not operator.ready()
    assert operator.healthy(), "a restart would mend nothing"
    assert operator.stop() == 0

    operator = start(*flags)
    eventually(lambda: injects(kubectl), 60)
    renewed = served(kubectl)
    now = datetime.datetime.now(datetime.UTC)
    assert now.timestamp() < operator.metric(EXPIRY) < renewed.expires_at.timestamp()

    # As the runbook of PlimsollWebhookCertificateExpiring says.
    empty = json.dumps({"data": None})
    kubectl("patch", "secret", NAME, "-n", NAMESPACE, "--type=merge", "-p", empty)
    eventually(lambda: served(kubectl).certificate not in (b"", renewed.certificate), 60)
    eventually(lambda: injects(kubectl), 60)


def test_a_secret_that_is_deleted_is_made_again_and_pods_are_injected(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    kubectl.apply(policy())
    operator = start(*flags, "--clock=webhook-check=2")
    eventually(lambda: injects(kubectl), 60)
    first = served(kubectl)

    kubectl("delete", "secret", NAME, "-n", NAMESPACE)
    eventually(lambda: served(kubectl).certificate not in (b"", first.certificate), 30)
    assert injects(kubectl), "who serves with the one before is still trusted"
    second = served(kubectl)
    assert operator.stop() == 0

    kubectl("delete", "secret", NAME, "-n", NAMESPACE)
    kubectl("delete", "mutatingwebhookconfiguration", NAME)
    start(*flags, "--clock=webhook-check=2")
    assert served(kubectl).certificate not in (b"", second.certificate), "ready means that"
    eventually(lambda: injects(kubectl), 30)


def test_a_provided_secret_without_a_bundle_is_named_and_keeps_it_from_being_ready(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    kubectl.apply(policy())
    now = datetime.datetime.now(datetime.UTC)
    made = create_server_certificate(HOST, create_ca_certificate(now), now)
    put(kubectl, NAMESPACE, replace(made, bundle=b""))
    operator = start(*flags, "--webhook-certificate-provided", ready=False)
    eventually(operator.healthy, 60)
    eventually(lambda: f"Secret {NAMESPACE}/{NAME} has no ca.crt" in operator.log.read_text(), 60)
    assert operator.metric("plimsoll_operator_webhook_ready") == 0
    assert not operator.ready()
    put(kubectl, NAMESPACE, made)
    eventually(operator.ready, 60)
    eventually(lambda: injects(kubectl), 30)
    assert operator.metric("plimsoll_operator_webhook_ready") == 1


def served(kubectl: Any) -> Certificate:
    """The certificate in the webhook's Secret; without a text where it has none."""
    secret = Kube(kubectl.kubectl, kubectl.kubeconfig, NAMESPACE).get("secret", NAME) or {}
    text = (secret.get("data") or {}).get("tls.crt", "")
    return Certificate(base64.b64decode(text), b"", b"")


def test_a_webhook_that_never_answers_costs_its_timeout(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    kubectl.apply(policy())
    operator = start(*flags)
    eventually(lambda: injects(kubectl), 60)
    operator.kill()
    port = int(flags[1].partition("=")[2])
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind((HOST, port))
        silent.listen(8)
        began = time.monotonic()
        assert not supervised(created(kubectl, pod()))
        assert time.monotonic() - began >= 1.5, "it did wait for the answer"


def test_a_slow_api_server_delays_the_status_and_no_pod(
    kubectl: Any, flags: tuple[str, ...], operator_account: Path, eventually: Any
) -> None:
    def selected() -> Any:
        return ((kubectl.get("plsp", "engines") or {}).get("status") or {}).get("selected")

    kubectl.apply(policy())
    with proxied(operator_account, seed=1) as (proxy, account):
        operator = Operator(account, kubectl.namespace, *flags, warm=True)
        try:
            eventually(lambda: injects(kubectl), 60)
            proxy.delay_s = SLOW_S
            before = len(kubectl.list("pods", "app=vllm"))
            for _ in range(5):
                assert supervised(created(kubectl, pod())), "answered from what is known"
            # Some 13 requests, one after another: objects, refusals, each pod, the status.
            eventually(lambda: selected() == before + 5, 20 * SLOW_S)
            assert operator.metric('plimsoll_operator_admissions_total{result="failed"}') == 0
        finally:
            proxy.delay_s = 0.0
            assert operator.stop() == 0, operator.log.read_text()


def dry_run(kubectl: Any, items: list[dict[str, Any]]) -> list[str]:
    """What the API server says against each, an empty text where it would take it."""
    said: list[str] = []
    for at in range(0, len(items), BATCH):
        named = []
        for number, item in enumerate(items[at : at + BATCH]):
            meta = {key: value for key, value in item["metadata"].items() if key != "namespace"}
            named.append(item | {"metadata": meta | {"name": f"fuzz-{number}"}})
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": named})
        done = kubectl.run("create", "--dry-run=server", "-o", "name", "-f", "-", stdin=text)
        taken = set(done.stdout.split())
        errors = re.split(r"\n(?=Error from server|The Pod )", done.stderr)
        for number in range(len(named)):
            whole = "\n".join(one for one in errors if f'"fuzz-{number}"' in one)
            said.append("" if f"pod/fuzz-{number}" in taken else whole or done.stderr)
    return said


@pytest.mark.parametrize(
    "count", [200, pytest.param(2000, marks=(pytest.mark.long, pytest.mark.timeout(3600)))]
)
def test_what_the_api_server_takes_before_it_takes_after(
    kubectl: Any, count: int, tmp_path: Path
) -> None:
    kubectl("label", "ns", kubectl.namespace, "pod-security.kubernetes.io/enforce-")
    images = Images("engine:1", "supervisor:1")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @given(pods(), policies())
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(before: dict[str, Any], wanted: Any) -> None:
        pairs.append((before, inject_pod(before, wanted, images).pod))

    collect()
    assert len(pairs) >= count * 0.9
    before = dry_run(kubectl, [one for one, _ in pairs])
    valid = [number for number, said in enumerate(before) if not said]
    after = dry_run(kubectl, [pairs[number][1] for number in valid])
    wrong = [(pairs[n][0], said) for n, said in zip(valid, after, strict=True) if said]
    assert not wrong, yaml.safe_dump(wrong[:3])
    injected = sum("initContainers" in pairs[n][1]["spec"] for n in valid)
    assert len(valid) > count / 2, "most are valid before, or this shows nothing"
    assert injected > count / 10
