"""A wish that has not changed is sent once, whatever a server or other admission makes of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.rewriter import REGISTRY, rewriter

TOUCHES = 5
WRITES = 'plimsoll_operator_writes_total{kind="'
KINDS = ("Deployment", "Service", "ServiceAccount", "ConfigMap", "HorizontalPodAutoscaler",
         "PodDisruptionBudget", "Role", "RoleBinding", "Lease", "ControllerRevision")  # fmt: skip
NUMBERS = itertools.count()


def writes(operator: Any) -> dict[str, float]:
    """Applications of owned objects so far, by kind."""
    found = {kind: operator.metric(f'{WRITES}{kind}",verb="apply"') for kind in KINDS}
    return {kind: count for kind, count in found.items() if count}


def touch(kubectl: Any, operator: Any, eventually: Any) -> None:
    """Reconcile the service, as many times as :data:`TOUCHES` says."""
    for _ in range(TOUCHES):
        before = operator.metric("plimsoll_operator_reconciles_total")
        note = {"metadata": {"annotations": {"example.org/touch": str(next(NUMBERS))}}}
        kubectl.patch("plinf", "tiny", note)
        eventually(lambda b=before: operator.metric("plimsoll_operator_reconciles_total") > b, 30)


def settled(operator: Any) -> dict[str, float]:
    """The writes, once there are no more of them for two seconds."""
    seen = writes(operator)
    for _ in range(30):
        time.sleep(2)
        if (now := writes(operator)) == seen:
            return seen
        seen = now
    raise AssertionError(f"it does not come to rest: {seen}")


def test_what_a_webhook_rewrites_is_not_applied_again(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    spec = manifest["spec"] | {
        "autoscaling": {
            "minReplicas": 1, "maxReplicas": 5,
            "target": {"metric": {"name": "m", "averageValue": "0.5"}},
        }
    }  # fmt: skip
    with rewriter(kubectl, tmp_path):
        time.sleep(3)  # until the API server knows of the webhook
        first = start()
        kubectl.apply(manifest | {"spec": spec})
        eventually(lambda: kubectl.get("hpa", "tiny"))
        made = eventually(lambda: kubectl.get("deployment", "tiny"))
        (engine,) = made["spec"]["template"]["spec"]["containers"]
        assert engine["image"].startswith(REGISTRY)
        before = settled(first)
        touch(kubectl, first, eventually)
        assert settled(first) == before

        kubectl.patch("deployment", "tiny", {"spec": {"minReadySeconds": 3}})
        kubectl("label", "service", "tiny", "app.kubernetes.io/name=mine", "--overwrite")
        label = ("service", "tiny", "inference-service")
        eventually(
            lambda: (
                kubectl.get(*label[:2])["metadata"]["labels"]["app.kubernetes.io/name"] == label[2]
            )
        )
        after = settled(first)
        assert after["Service"] == before["Service"] + 1, "what a person changes is put back"
        assert after["Deployment"] == before["Deployment"], "what a person adds is theirs"

        first.stop()
        second = start()
        again = settled(second)
        assert all(count <= 1 for count in again.values()), "once after a start"
        touch(kubectl, second, eventually)
        assert settled(second) == again


@pytest.mark.parametrize("written", ["0.5", "1000m", "1e1", "10"])
def test_an_amount_that_the_server_writes_differently(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any,
    written: str,
) -> None:  # fmt: skip
    operator = start()
    target = {"metric": {"name": "m", "averageValue": written}}
    scaling = {"minReplicas": 1, "maxReplicas": 3, "target": target}
    kubectl.apply(manifest | {"spec": manifest["spec"] | {"autoscaling": scaling}})
    eventually(lambda: kubectl.get("hpa", "tiny"))
    before = settled(operator)
    touch(kubectl, operator, eventually)
    assert settled(operator) == before


def test_fields_that_the_server_drops_are_named_and_not_sent_again(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    """Both are behind features that 1.34 has off."""
    engine = {"name": "engine", "lifecycle": {"stopSignal": "SIGINT"}}
    manifest["spec"]["podTemplate"]["spec"] |= {"hostnameOverride": "abc", "containers": [engine]}
    operator = start()
    kubectl.apply(manifest)
    said = eventually(lambda: kubectl.condition("tiny", "ObjectsComplete"))
    assert (said["status"], said["reason"]) == ("False", "FieldsNotKept"), said
    for one in ("Deployment tiny: ", "spec.template.spec.hostnameOverride",
                "spec.template.spec.containers[engine].lifecycle.stopSignal"):  # fmt: skip
        assert one in said["message"]
    before = settled(operator)
    touch(kubectl, operator, eventually)
    assert settled(operator) == before
    assert kubectl.condition("tiny", "ObjectsComplete") == said, "it is said once"
