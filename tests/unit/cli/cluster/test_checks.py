"""What doctor makes of a supervisor's answer: unknown is neither well nor ill.

Tests ``cluster/doctor.py``.
"""

from __future__ import annotations

import base64
import datetime
from typing import Any

import pytest

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_cli.cluster import checks
from plimsoll_cli.cluster.checks import Check, check_policy_status
from plimsoll_cli.cluster.doctor import (
    MAX_TESTED_KUBERNETES_MINOR,
    MIN_KUBERNETES_MINOR,
    check_shared_memory,
    check_version,
    format_out_of_service_reasons,
)
from plimsoll_operator.admission.certificate import create_ca_certificate

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("minor", "ok", "told"),
    [
        (MIN_KUBERNETES_MINOR - 1, False, "Plimsoll needs Kubernetes 1."),
        (MIN_KUBERNETES_MINOR, True, "Kubernetes v1."),
        (MAX_TESTED_KUBERNETES_MINOR, True, "Kubernetes v1."),
        (MAX_TESTED_KUBERNETES_MINOR + 1, True, "the newest release that Plimsoll"),
    ],
)
def test_a_cluster_outside_of_the_tested_range_is_named(minor: int, ok: bool, told: str) -> None:
    found = check_version("host", {"minor": f"{minor}+", "gitVersion": f"v1.{minor}.0"})
    assert (found.ok, told in found.text) == (ok, True)
    assert ("newest" in found.text) == (minor > MAX_TESTED_KUBERNETES_MINOR)


def test_unreadable_shared_memory_is_unknown_with_its_reason() -> None:
    reason = "/dev/shm has more than 4096 files"
    for stood in (None, 4096):
        seen = ActionAnswer(shared_orphan=stood, shared_memory_error=reason)
        assert list(check_shared_memory("qwen-0", seen)) == [
            Check("qwen-0 /dev/shm", None, f"unknown: {reason}")
        ]


def test_shared_memory_that_is_known_or_not_watched() -> None:
    seen = ActionAnswer(shared_orphan=2 << 20)
    assert list(check_shared_memory("qwen-0", seen)) == [
        Check("qwen-0 /dev/shm", True, "2.0 MiB in /dev/shm belong to no running process")
    ]
    assert list(check_shared_memory("qwen-0", ActionAnswer())) == [], "the pod has no volume there"


def test_why_a_pod_is_out_of_service() -> None:
    assert format_out_of_service_reasons("a", ActionAnswer()) == ""
    text = format_out_of_service_reasons("a", ActionAnswer(out_of_service={"manual": 840.0}))
    assert text == "out of service: drained by a person (until you run plimsoll resume a); "
    text = format_out_of_service_reasons(
        "a", ActionAnswer(out_of_service={"restart": 60.0, "later": 1.0})
    )
    assert text == "out of service: the engine is restarting (for at most 1 min more); "


@pytest.mark.parametrize(
    ("later", "ok", "text"),
    [
        (DAY, True, "issued 1 days ago, expires on 2026-04-01"),
        (75 * DAY, False, "in 15 days: its renewal is overdue"),
        (90 * DAY, False, "the certificate has expired, so that new pods get no supervisor"),
    ],
)
def test_a_certificate_that_was_not_renewed_is_an_error(
    later: datetime.timedelta, ok: bool, text: str
) -> None:
    older, newer = (
        create_ca_certificate(NOW - 60 * DAY, 90 * DAY),
        create_ca_certificate(NOW, 90 * DAY),
    )
    bundle = base64.b64encode(older.certificate + newer.certificate).decode()
    check = checks.check_certificate_bundle(bundle, NOW + later)
    assert check.ok is ok
    assert text in check.text
    assert checks.check_certificate_bundle("bm9uZQ==", NOW).ok is False


def policy(selector: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "n", "generation": 2},
        "spec": {"selector": selector, "engine": {"container": "server"}},
        "status": status,
    }


def test_a_trial_has_the_labels_that_the_selector_asks_for() -> None:
    expressions = [
        {"key": "tier", "operator": "In", "values": ["a", "b"]},
        {"key": "gpu", "operator": "Exists"},
        {"key": "canary", "operator": "DoesNotExist"},
    ]
    selector = {"matchLabels": {"app": "vllm"}, "matchExpressions": expressions}
    pod = checks.make_test_pod(policy(selector))
    assert pod is not None
    assert pod["metadata"]["labels"] == {"app": "vllm", "tier": "a", "gpu": ""}
    assert pod["spec"]["containers"][0]["name"] == "server"
    selector["matchLabels"] = {"canary": "x"}
    assert checks.make_test_pod(policy(selector)) is None, "nothing has and lacks one label"


def test_what_the_pod_of_a_trial_shows() -> None:
    def made(labels: dict[str, str], sidecar: bool, **annotations: str) -> dict[str, Any]:
        named = {key.replace("_", "-"): value for key, value in annotations.items()}
        sidecars = [{"name": "supervisor"}] if sidecar else []
        metadata = {"labels": labels, "annotations": {f"plimsoll.dev/{k}": named[k] for k in named}}
        return {"metadata": metadata, "spec": {"initContainers": sidecars}}

    ours, theirs = {"plimsoll.dev/policy": "p"}, {"plimsoll.dev/policy": "older"}
    for pod, ok, text in (
        (made(ours, True), True, "gets a supervisor"),
        (made(theirs, True), False, "the older policy older supervises"),
        (made({}, False, not_supervised="port 9464 is taken"), True, "port 9464 is taken"),
        (made({}, False), False, "the webhook does not answer"),
        (made(ours, False), False, "the webhook does not answer"),
    ):
        check = checks.check_admission("w", pod, "p")
        assert (check.ok, text in check.text) == (ok, True), check


def test_what_the_status_of_a_policy_says() -> None:
    selector = {"matchLabels": {"app": "vllm"}}
    (unread,) = check_policy_status(policy(selector, observedGeneration=1))
    assert unread.ok is None
    ready = {"type": "Ready", "status": "True", "reason": "NoPods", "message": "no pod matches"}
    counted = {"observedGeneration": 2, "conditions": [ready]}
    (none,) = check_policy_status(policy(selector, selected=0, supervised=0, **counted))
    assert none.ok is False
    assert "compare spec.selector with the labels of the pods" in none.text
    (whole,) = check_policy_status(policy(selector, selected=2, supervised=2, **counted))
    assert whole.ok is True
    why = "pod a does not start: container supervisor, image s:1: ImagePullBackOff"
    for state, reason in (("True", "PodsDoNotStart"), ("False", "PodDoesNotStart")):
        stopped = {"type": "InjectionStopped", "status": state, "reason": reason, "message": why}
        both = {"observedGeneration": 2, "conditions": [ready, stopped]}
        _, stuck = check_policy_status(policy(selector, selected=2, supervised=2, **both))
        assert (stuck.name, stuck.ok, stuck.text) == ("policy p injection", False, why)
    refusals = [{"pod": "a", "reason": "spec.hostPID is true"}]
    partly, refused = check_policy_status(
        policy(selector, selected=2, supervised=1, refusals=refusals, **counted)
    )
    assert (partly.ok, refused.ok) == (False, False)
    assert refused.text == "pod a: spec.hostPID is true"


@pytest.mark.parametrize("fits", [True, False])
def test_it_tells_what_memory_a_service_needs_and_what_to_set(fits: bool) -> None:
    text = "host memory needs 17.2 GiB at the current load" + (
        "" if fits else "; the request of 10.0 GiB is too small"
    )
    resources = {"requests": {"memory": "17664Mi"}, "limits": {"memory": "33Gi"}}
    said = {"message": text, "resources": resources}
    (found,) = checks.check_memory_recommendation("service qwen", {"recommendation": said})
    assert (found.name, found.ok) == ("service qwen memory", fits)
    assert found.text == text + (
        "" if fits else "; set requests.memory: 17664Mi, limits.memory: 33Gi"
    )
    assert list(checks.check_memory_recommendation("service qwen", {})) == []
