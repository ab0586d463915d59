"""What the webhook answers, what the API server is told to ask, and the certificate.

Tests ``admission/review.py``, ``admission/certificate.py`` and ``admission/configuration.py``.
"""

from __future__ import annotations

import base64
import datetime
import json
import ssl
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll_operator.admission.certificate import (
    CA_CERTIFICATE_LIFETIME,
    SERVER_CERTIFICATE_LIFETIME,
    Certificate,
    create_ca_certificate,
    create_server_certificate,
    is_ca_certificate,
    needs_renewal,
)
from plimsoll_operator.admission.configuration import (
    MAX_WEBHOOKS,
    WebhookAddress,
    build_configuration,
    has_equal_webhooks,
)
from plimsoll_operator.admission.review import PolicyCache, Reviewer, make_json_patch
from plimsoll_operator.render.containers import Images
from tests.pod_specs import SELECTED
from tests.pod_specs import policy as parsed

Object = dict[str, Any]
IMAGES = Images("e", "s")
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SECOND = datetime.timedelta(seconds=1)
ADDRESS = WebhookAddress("sys", "plimsoll-webhook")


def policy(name: str = "p", namespace: str = "ns", **meta: Any) -> Object:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"{namespace}-{name}",
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-02T00:00:00Z",
        }
        | meta,
        "spec": {"selector": {"matchLabels": SELECTED}},
    }


def known(*items: Object) -> PolicyCache:
    made = PolicyCache()
    for item in items:
        made.update(item, deleted=False)
    return made


def pod(image: str = "vllm/vllm-openai:v0.24.0", **meta: Any) -> Object:
    return {
        "metadata": {"generateName": "vllm-", "labels": dict(SELECTED)} | meta,
        "spec": {"containers": [{"name": "engine", "image": image}]},
    }


def review(item: Any, namespace: str = "ns", operation: str = "CREATE") -> Object:
    request = {
        "uid": "u-1",
        "operation": operation,
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": namespace,
        "object": item,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def answered(
    asked: Any, policies: PolicyCache | None = None, images: Any = IMAGES
) -> tuple[Object, Counter[str]]:
    results: Counter[str] = Counter()
    reviewer = Reviewer(policies or known(policy()), images, lambda one: results.update([one]))
    whole = reviewer.respond(asked)
    assert json.loads(json.dumps(whole))["kind"] == "AdmissionReview"
    found: Object = whole["response"]
    return found, results


def operations(response: Object) -> list[Object]:
    found: list[Object] = json.loads(base64.b64decode(response["patch"]))
    return found


def test_a_selected_pod_is_patched() -> None:
    response, results = answered(review(pod()))
    assert (response["uid"], response["allowed"]) == ("u-1", True)
    assert response["patchType"] == "JSONPatch"
    paths = {one["path"] for one in operations(response)}
    assert paths == {
        "/metadata/annotations",
        "/metadata/labels",
        "/spec/containers",
        "/spec/initContainers",
        "/spec/shareProcessNamespace",
        "/spec/volumes",
    }
    assert results == {"injected": 1}


def test_a_refused_pod_gets_an_annotation_and_its_creator_a_warning() -> None:
    response, results = answered(review(pod("nginx")))
    (operation,) = operations(response)
    assert operation["path"] == "/metadata/annotations"
    (warning,) = response["warnings"]
    assert warning.startswith(
        "SupervisionPolicy p: this pod gets no supervisor: no container runs vLLM"
    )
    assert results == {"refused": 1}


@pytest.mark.parametrize(
    "asked",
    [
        review(pod(), namespace="other"),
        review(pod(labels={"fuzz": "no"})),
        review(pod(), operation="UPDATE"),
        review(
            pod(
                labels=SELECTED
                | {
                    "plimsoll.dev/service": "tiny",
                    "app.kubernetes.io/managed-by": "plimsoll-operator",
                }
            )
        ),
    ],
)
def test_other_pods_are_left_alone(asked: Object) -> None:
    response, results = answered(asked)
    assert response == {"uid": "u-1", "allowed": True}
    assert results == {"unselected": 1}


@pytest.mark.parametrize(
    "asked",
    [
        None,
        [],
        {},
        {"request": None},
        {"request": {"uid": 7}},
        review(None),
        review({"metadata": {"labels": SELECTED}}),
        review({"metadata": {"labels": SELECTED}, "spec": "none"}),
    ],
)
def test_an_error_costs_no_pod(asked: Any) -> None:
    response, results = answered(asked)
    assert response["allowed"] is True
    assert "patch" not in response
    assert isinstance(response["uid"], str)
    assert results == {"failed": 1}


def test_a_bug_of_ours_costs_no_pod(caplog: pytest.LogCaptureFixture) -> None:
    response, results = answered(review(pod()), images=None)
    assert response == {"uid": "u-1", "allowed": True}
    assert results == {"failed": 1}
    assert "created without a supervisor" in caplog.text


def test_of_two_policies_the_older_one_has_the_pod() -> None:
    older = policy("z", creationTimestamp="2026-01-01T00:00:00Z")
    policies = known(policy("a"), older)
    found = policies.find("ns", SELECTED)
    assert found is not None
    assert found.metadata.name == "z"
    policies.update(older | {"status": {"selected": 1}}, deleted=False)
    again = policies.find("ns", SELECTED)
    assert again is found, "a change of the status alone is not parsed"
    assert policies.get_status(found) == {"selected": 1}
    policies.update(older, deleted=True)
    found = policies.find("ns", SELECTED)
    assert found is not None
    assert found.metadata.name == "a"


def test_fields_that_are_gone_are_removed_by_the_patch() -> None:
    before: Object = {"metadata": {"annotations": {}, "labels": {}}, "spec": {}}
    assert make_json_patch(before, {"metadata": {"labels": {}}, "spec": {}}) == [
        {"op": "remove", "path": "/metadata/annotations"}
    ]


def test_each_policy_has_a_webhook_that_asks_about_its_pods_alone() -> None:
    made = build_configuration("w", [parsed("a"), parsed("b")], ADDRESS, b"CA")
    first, second = made["webhooks"]
    assert first["name"] != second["name"]
    assert first["failurePolicy"] == "Ignore"
    assert first["timeoutSeconds"] == 2
    assert first["objectSelector"]["matchLabels"] == SELECTED
    (within,) = first["namespaceSelector"]["matchExpressions"]
    assert within["values"] == ["default"]
    assert first["clientConfig"]["service"]["name"] == "plimsoll-webhook"
    assert base64.b64decode(first["clientConfig"]["caBundle"]) == b"CA"
    assert has_equal_webhooks(made, {"webhooks": [second, first]})
    assert not has_equal_webhooks(made, {"webhooks": [first]})
    assert not has_equal_webhooks(made, {"webhooks": [first, second | {"timeoutSeconds": 30}]})


def test_the_number_of_webhooks_is_bounded() -> None:
    many = [parsed(f"p-{number}") for number in range(500)]
    made = build_configuration("w", many, ADDRESS, b"CA")
    assert len(made["webhooks"]) == MAX_WEBHOOKS + 1
    last = made["webhooks"][-1]
    assert last["namespaceSelector"]["matchExpressions"][0]["values"] == ["default"]
    assert "matchLabels" not in last["objectSelector"]


def test_no_namespace_takes_the_webhooks_of_the_others() -> None:
    crowd = [policy(f"p{number:03}", "aaa") for number in range(MAX_WEBHOOKS + 5)]
    late = [policy("p", namespace) for namespace in ("zzy", "zzz")]
    made = build_configuration("w", known(*crowd, *late).list_all(), ADDRESS, b"B")
    own = [one for one in made["webhooks"] if not one["name"].startswith("shared")]
    where = Counter(one["namespaceSelector"]["matchExpressions"][0]["values"][0] for one in own)
    assert where == {"aaa": MAX_WEBHOOKS - 2, "zzy": 1, "zzz": 1}
    (shared,) = made["webhooks"][MAX_WEBHOOKS:]
    assert shared["namespaceSelector"]["matchExpressions"][0]["values"] == ["aaa"]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        (None, "plimsoll-webhook.sys.svc"),
        ("https://127.0.0.1:9443/pods", "127.0.0.1"),
        ("https://hook.example/pods", "hook.example"),
        ("https://[::1]:9443", "::1"),
    ],
)
def test_the_certificate_is_for_the_address(url: str | None, host: str, tmp_path: Path) -> None:
    address = WebhookAddress("sys", "plimsoll-webhook", url)
    assert address.host == host
    made = create_server_certificate(host, create_ca_certificate(NOW), NOW)
    assert made.is_valid_for(host)
    assert not made.is_valid_for("other")
    certificate, key = tmp_path / "c", tmp_path / "k"
    certificate.write_bytes(made.certificate)
    key.write_bytes(made.key)
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)


def test_a_certificate_is_replaced_when_a_third_of_it_is_left() -> None:
    first = create_ca_certificate(NOW)
    left = CA_CERTIFICATE_LIFETIME / 3
    assert not needs_renewal(
        first, NOW + CA_CERTIFICATE_LIFETIME - left - SECOND, CA_CERTIFICATE_LIFETIME
    )
    assert needs_renewal(first, NOW + CA_CERTIFICATE_LIFETIME - left, CA_CERTIFICATE_LIFETIME)
    assert needs_renewal(None, NOW, SERVER_CERTIFICATE_LIFETIME)
    assert needs_renewal(Certificate(b"?", b"?", b"?"), NOW, SERVER_CERTIFICATE_LIFETIME)
    late = NOW + CA_CERTIFICATE_LIFETIME - SECOND
    assert create_server_certificate("h", first, late).expires_at == first.expires_at, (
        "a leaf ends with its authority"
    )
    assert (
        create_server_certificate("h", first, NOW).expires_at == NOW + SERVER_CERTIFICATE_LIFETIME
    )


def test_only_an_authority_with_its_own_key_signs() -> None:
    first, second = create_ca_certificate(NOW), create_ca_certificate(NOW)
    assert is_ca_certificate(first)
    assert not is_ca_certificate(replace(first, key=second.key))
    assert not is_ca_certificate(replace(first, key=b"?"))
    assert not is_ca_certificate(create_server_certificate("h", first, NOW))
    assert create_server_certificate("h", first, NOW).bundle == first.certificate


def test_the_largest_selectors_do_not_make_the_configuration_too_large() -> None:
    term = {"operator": "NotIn", "values": [f"{'v' * 60}{n:03}" for n in range(32)]}
    large = {"matchExpressions": [term | {"key": f"a.b/{'k' * 60}{n}"} for n in range(16)]}
    many = [parsed(name=f"p-{n}", selector=large) for n in range(MAX_WEBHOOKS)]
    made = build_configuration("w", many, WebhookAddress("ns", "w"), b"ca")
    assert len(json.dumps(made)) < 1 << 20
    assert made["webhooks"][-1]["name"].startswith("shared-")
