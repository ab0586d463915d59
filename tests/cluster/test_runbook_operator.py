"""docs/runbooks/PlimsollOperatorWatchStale.md acted out: a lost permission, seen and given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.images import ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace
from tests.lab.operator import Operator, operator_kubeconfig

AGE = "plimsoll_operator_canary_age_seconds"
OPERATOR = "app.kubernetes.io/component=operator"
BINDING = "clusterrolebinding/plimsoll-operator"
CANARY_S = 2.0


@pytest.mark.long
def test_a_lost_permission_makes_the_canary_old_and_applying_config_gives_it_back(
    cluster: Lab, tmp_path: Path
) -> None:
    system = Kube(cluster.kube.kubectl, cluster.kube.kubeconfig, "plimsoll-system")
    with namespace(cluster.kube) as kube:
        account = operator_kubeconfig(kube, tmp_path / "kubeconfig")
        operator = Operator(account, kube.namespace, f"--clock=canary={CANARY_S}")
        try:
            system("delete", BINDING)
            eventually(
                lambda: operator.metric(AGE) > 1.5 * CANARY_S,
                "the canary's age grows",
                10 * CANARY_S,
            )
            assert "canary:" in operator.log.read_text(), "the log says what was refused"
            system("apply", "--server-side", "--force-conflicts", "-k", str(ROOT / "config"))
            eventually(
                lambda: operator.metric(AGE) < CANARY_S, "the canary reads again", 30 * CANARY_S
            )
            system("rollout", "restart", "deployment", "-l", OPERATOR)
            system("logs", "-l", OPERATOR, "--tail=50")
        finally:
            operator.stop()
            operator_kubeconfig(kube, tmp_path / "restored")  # roles as every test has them
            for name in ("operator", "admission-policy"):
                system("delete", "--ignore-not-found", "-f", str(ROOT / "config" / f"{name}.yaml"))
