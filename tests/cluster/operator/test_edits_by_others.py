"""What others do to owned objects is put back; what others own is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def tiny(kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any) -> Any:
    start()
    kubectl.apply(manifest)
    eventually(lambda: kubectl.get("deployment", "tiny"))
    return kubectl


def test_edits_are_put_back_at_once(tiny: Any, eventually: Any) -> None:
    edits: list[tuple[str, str, dict[str, Any], Callable[[Any], bool]]] = [
        ("deployment", "tiny", {"spec": {"replicas": 7}}, lambda o: o["spec"]["replicas"] == 1),
        (
            "service",
            "tiny",
            {"spec": {"selector": {"plimsoll.dev/service": "other"}}},
            lambda o: o["spec"]["selector"] == {"plimsoll.dev/service": "tiny"},
        ),
        (
            "configmap",
            "tiny-supervisor",
            {"data": {"supervisor.json": "{}"}},
            lambda o: len(o["data"]["supervisor.json"]) > 100,
        ),
        ("role", "tiny-supervisor", {"rules": []}, lambda o: len(o["rules"] or []) == 5),
        (
            "pdb",
            "tiny",
            {"spec": {"maxUnavailable": "50%"}},
            lambda o: o["spec"]["maxUnavailable"] == 1,
        ),
        (
            "lease",
            "tiny-restart-0",
            {"metadata": {"labels": {"plimsoll.dev/service": None}}},
            lambda o: o["metadata"]["labels"].get("plimsoll.dev/service") == "tiny",
        ),
        (
            "serviceaccount",
            "tiny-supervisor",
            {"automountServiceAccountToken": True},
            lambda o: o["automountServiceAccountToken"] is False,
        ),
    ]
    for what, name, patch, restored in edits:
        tiny.patch(what, name, patch)
        began = time.monotonic()
        eventually(lambda w=what, n=name, r=restored: r(tiny.get(w, n)), 5)
        print(f"{what}: put back after {time.monotonic() - began:.2f} s")


def test_deleted_objects_come_back(tiny: Any, eventually: Any) -> None:
    for item in tiny.owned("tiny"):
        kind, meta = item["kind"], item["metadata"]
        tiny("delete", kind, meta["name"], "--wait=false")
        eventually(
            lambda k=kind, m=meta: (
                (found := tiny.get(k, m["name"])) and found["metadata"]["uid"] != m["uid"]
            ),
            10,
        )


def test_what_others_add_stays(tiny: Any, eventually: Any) -> None:
    tiny.patch("service", "tiny", {"metadata": {"annotations": {"example.org/note": "mine"}}})
    tiny.patch("lease", "tiny-restart-0", {"spec": {"holderIdentity": "pod-1"}})
    tiny.patch("service", "tiny", {"spec": {"selector": {"plimsoll.dev/service": "x"}}})
    selector = {"plimsoll.dev/service": "tiny"}
    eventually(lambda: tiny.get("service", "tiny")["spec"]["selector"] == selector)
    assert tiny.get("service", "tiny")["metadata"]["annotations"]["example.org/note"] == "mine"
    assert tiny.get("lease", "tiny-restart-0")["spec"]["holderIdentity"] == "pod-1"


def test_an_object_of_somebody_else_is_not_taken_over(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    kubectl("create", "service", "clusterip", "tiny", "--tcp=81")
    before = kubectl.get("service", "tiny")
    start()
    kubectl.apply(manifest)
    found = eventually(lambda: kubectl.conditions("tiny"))
    assert found["Ready"]["reason"] == "NameConflict"
    assert f"Service {kubectl.namespace}/tiny already exists" in found["Ready"]["message"]
    assert found["Stalled"]["status"] == "True"
    assert kubectl.get("service", "tiny") == before

    kubectl("delete", "service", "tiny")
    eventually(lambda: kubectl.get("deployment", "tiny"), 30)
    eventually(lambda: kubectl.condition("tiny", "Stalled")["status"] == "False")
