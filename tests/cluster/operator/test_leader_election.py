"""Of two operators one works; the other takes over when the first ends, well or badly."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.faults import proxied
from tests.lab.operator import Operator


def test_a_successor_takes_over(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    lease = f"--leader-election={kubectl.namespace}/operator"

    def leading(operator: Any) -> bool:
        return bool(operator.metric("plimsoll_operator_leader") == 1)

    def holder() -> str:
        return str(kubectl.get("lease", "operator")["spec"]["holderIdentity"])

    first = start(lease)
    eventually(lambda: leading(first))
    second = start(lease)
    kubectl.apply(manifest)
    eventually(lambda: kubectl.get("deployment", "tiny"))
    assert second.metric("plimsoll_operator_reconciles_total") == 0, "it only stands by"
    assert not leading(second)
    before = holder()

    assert first.stop() == 0
    eventually(lambda: leading(second), 8)
    assert holder() not in ("", before)

    third = start(lease)
    second.kill()
    eventually(lambda: leading(third), 30)
    kubectl("delete", "deployment", "tiny", "--wait=false")
    eventually(lambda: kubectl.get("deployment", "tiny"))


def test_who_loses_the_lease_ends(kubectl: Any, start: Callable[..., Any], eventually: Any) -> None:
    operator = start(f"--leader-election={kubectl.namespace}/operator")
    eventually(lambda: operator.metric("plimsoll_operator_leader") == 1)
    kubectl.patch("lease", "operator", {"spec": {"holderIdentity": "somebody-else"}})
    assert operator.ended() == 1
    assert "another operator may have taken over" in operator.log.read_text()


def test_a_list_that_takes_longer_than_the_lease_costs_no_leadership(
    kubectl: Any, operator_account: Path, start: Callable[..., Any], eventually: Any
) -> None:
    flags = [f"--leader-election={kubectl.namespace}/operator"]
    flags += ["--clock=lease=6", "--clock=renew=4", "--clock=retry=0.5"]

    def spec() -> dict[str, Any]:
        return dict((kubectl.get("lease", "operator") or {}).get("spec") or {})

    with proxied(operator_account, seed=5) as (proxy, account):
        proxy.delay_s = 0.5  # an answer: there are some 17 lists
        slow = Operator(account, kubectl.namespace, *flags, ready=False, warm=True)
        try:
            eventually(lambda: spec().get("holderIdentity"), 60)
            began, holder = time.monotonic(), spec()["holderIdentity"]
            standby = start(*flags)
            eventually(lambda: "watching" in slow.log.read_text(), 60)
            assert time.monotonic() - began > 6, "it lists for longer than the Lease lasts"
            assert spec()["holderIdentity"] == holder
            assert spec()["leaseTransitions"] == 0
            assert standby.metric("plimsoll_operator_leader") == 0
        finally:
            assert slow.stop() == 0, slow.log.read_text()
