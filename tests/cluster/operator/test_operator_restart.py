"""A restarted operator writes nothing, and a new one does not roll engine pods."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

OLD = ("--engine-image=engine:1", "--supervisor-image=supervisor:1")
NEW = ("--engine-image=engine:2", "--supervisor-image=supervisor:2")


def versions(kubectl: Any) -> dict[str, str]:
    items = [*kubectl.owned("tiny"), kubectl.get("plinf", "tiny")]
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for item in items
    }


def settled(kubectl: Any, operator: Any) -> dict[str, str]:
    """Versions once the operator has nothing to do and nothing changed for a second."""
    before: dict[str, str] = {}
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = versions(kubectl)
        idle = operator.metric("plimsoll_operator_queue_length") == 0
        if now == before and idle and operator.metric("plimsoll_operator_reconciles_total"):
            return now
        before = now
        time.sleep(1)
    raise AssertionError("the cluster does not come to rest")


def test_a_restart_writes_nothing(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    first = start(*OLD)
    kubectl.apply(manifest)
    eventually(lambda: kubectl.list("pods", "plimsoll.dev/service=tiny"))
    kubectl.play_kubelet("tiny")
    kubectl("wait", "--for=condition=Ready", "plinf/tiny", "--timeout=10s")
    before = settled(kubectl, first)
    began = time.monotonic()
    assert first.stop() == 0
    stopped = time.monotonic()
    second = start(*OLD)
    print(f"stopped in {stopped - began:.2f} s, healthy in {time.monotonic() - stopped:.2f} s")
    eventually(lambda: second.metric("plimsoll_operator_reconciles_total"))
    time.sleep(2.5)  # longer than a round of scrapes
    assert settled(kubectl, second) == before
    assert second.metric("plimsoll_operator_writes_total") == 0


def test_an_upgrade_rolls_no_pods_until_it_is_asked_for(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    def image() -> str:
        template = kubectl.get("deployment", "tiny")["spec"]["template"]
        return str(template["spec"]["containers"][0]["image"])

    first = start(*OLD)
    kubectl.apply(manifest)
    eventually(lambda: kubectl.get("deployment", "tiny"))
    before = settled(kubectl, first)
    first.stop()

    second = start(*NEW)
    assert settled(kubectl, second) == before
    # Also after a change that does not concern pods, and against somebody's edit of the template.
    kubectl.patch("plinf", "tiny", {"spec": {"supervision": {"mode": "Observe"}}})
    eventually(lambda: "Observe" in str(kubectl.get("configmap", "tiny-supervisor")["data"]))
    kubectl("set", "image", "deployment/tiny", "engine=engine:foreign")
    eventually(lambda: image() == "engine:1")

    kubectl.patch("plinf", "tiny", {"spec": {"restart": {"id": "1"}}})
    eventually(lambda: image() == "engine:2")
    # Neither was rolled out completely, so there is none to go back to.
    eventually(lambda: len(kubectl.list("controllerrevisions", "plimsoll.dev/service=tiny")) == 1)


def test_it_says_what_is_missing(kubectl: Any, operator_account: Any) -> None:
    """Without permission it ends with the API server's sentence rather than watch nothing."""
    import subprocess
    import sys

    text = operator_account.read_text().replace("token: ", "token: x")
    broken = operator_account.with_name("broken")
    broken.write_text(text)
    command = [sys.executable, "-m", "plimsoll_operator.main", "run", "--http-port", "0"]
    done = subprocess.run(
        [*command, "--kubeconfig", str(broken)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "failed to start the operator: 401 Unauthorized" in done.stderr
