"""Of two operators one works; the other takes over when the first ends, well or badly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
