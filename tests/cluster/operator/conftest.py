"""The operator as a process, under its real ClusterRole, on a real control plane.

No kubelet runs here: a test that needs running pods writes their status as a kubelet would.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_operator.kinds import OWNED_KINDS
from tests.lab.kube import Document, Kube
from tests.lab.lab import Lab
from tests.lab.objects import NotFound
from tests.lab.operator import Operator, operator_kubeconfig
from tests.lab.webhook import Webhook

ROOT = Path(__file__).parents[3]
WAIT_S = 20.0
FAST = {
    "policy_pods": 0.2, "publish": 2.0,
    "rollout_settle": 2.0, "event": 2.0, "quiet": 1.0,
}  # fmt: skip
"""Clocks of the operators under test, in seconds; the defaults are minutes."""
OWNED_PLURALS = ",".join(
    f"{kind.plural}.{kind.group}".rstrip(".") for kind in OWNED_KINDS if kind.watched
)


def eventually(check: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """The first true value of ``check``; AssertionError with its last one after ``timeout_s``.

    A field that an object does not have yet is not there yet.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            value = check()
        except KeyError as missing:
            value, found = missing, False
        else:
            found = bool(value)
        if found:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s; last: {value!r}"
        time.sleep(0.1)


class Kubectl(Kube):
    """kubectl in one namespace, as the cluster's administrator."""

    def __init__(self, cluster: Lab, namespace: str) -> None:
        super().__init__(cluster.kube.kubectl, cluster.kubeconfig, namespace)

    def apply(self, *documents: Document, force: bool = True) -> None:
        super().apply(*documents, force=force)

    def condition(self, name: str, type_: str) -> dict[str, Any]:
        """A condition of an InferenceService, empty where it has none."""
        return self.conditions(name).get(type_, {})

    def conditions(self, name: str, kind: str = "plinf") -> dict[str, dict[str, Any]]:
        """All conditions of an object by type, from one look: they belong together."""
        status = (self.get(kind, name) or {}).get("status") or {}
        return {one["type"]: one for one in status.get("conditions", [])}

    def holds(self, name: str, kind: str = "plinf", **wanted: str) -> bool:
        """Whether, in one look, each condition has the status or the reason that is wanted."""
        found = self.conditions(name, kind)
        return all(
            value in (found.get(type_, {}).get("status"), found.get(type_, {}).get("reason"))
            for type_, value in wanted.items()
        )

    def owned(self, service: str) -> list[dict[str, Any]]:
        """Everything that the operator made for ``service``."""
        return self.list(OWNED_PLURALS, f"plimsoll.dev/service={service}")

    def play_kubelet(
        self, service: str, address: str = "10.1.2.3", leave: Collection[str] = ()
    ) -> int:
        """Writes the status of the service's pods as if both containers were ready; returns how
        many there are. Those with the UIDs in ``leave`` keep theirs."""
        pods = self.list("pods", f"plimsoll.dev/service={service}")
        for pod in pods:
            if pod["metadata"]["uid"] not in leave:
                self.set_running(pod, address)
        return len(pods)

    def set_running(self, pod: dict[str, Any], address: str = "10.1.2.3") -> None:
        """Write the status of ``pod`` as if all of its containers were ready."""
        names = [one["name"] for one in pod["spec"]["containers"]]
        inits = [one["name"] for one in pod["spec"].get("initContainers", [])]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [_running(name) for name in names],
            "initContainerStatuses": [_running(name) for name in inits],
        }
        # During a roll-out it may be gone by now.
        with contextlib.suppress(NotFound):
            self.patch("pod", pod["metadata"]["name"], {"status": status}, "status")


def _running(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "ready": True,
        "started": True,
        "restartCount": 0,
        "image": "x",
        "imageID": "x",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }


@pytest.fixture(scope="session")
def operator_account(cluster: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's own service account, with the ClusterRole of config/ and nothing else."""
    return operator_kubeconfig(cluster.kube, tmp_path_factory.mktemp("operator") / "kubeconfig")


@pytest.fixture
def admin(cluster: Lab) -> Kubectl:
    """For what the API server refuses or only tries: a namespace of its own would stay empty."""
    return Kubectl(cluster, "default")


@pytest.fixture
def kubectl(cluster: Any, operator_account: Path) -> Iterator[Kubectl]:
    """A namespace of the test's own that admits only restricted pods."""
    admin = Kubectl(cluster, f"operator-{uuid.uuid4().hex[:8]}")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": admin.namespace, "labels": labels}
    admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    yield admin
    admin.delete("namespace", admin.namespace)


@pytest.fixture
def start(kubectl: Kubectl, operator_account: Path) -> Iterator[Callable[..., Operator]]:
    """Starts operators on the test's namespace; all are stopped and must have ended well."""
    started: list[Operator] = []

    def make(*flags: str, ready: bool = True) -> Operator:
        clocks = [f"--clock={name.replace('_', '-')}={value}" for name, value in FAST.items()]
        account, flags = operator_account, (*clocks, *flags)
        started.append(Operator(account, kubectl.namespace, *flags, ready=ready, warm=True))
        return started[-1]

    yield make
    for operator in started:
        assert operator.stop() == 0, operator.log.read_text()


@pytest.fixture
def webhook(kubectl: Kubectl) -> Iterator[Webhook]:
    """The chart's objects for the webhook, for the tests' operator account."""
    made = Webhook(kubectl)
    made.install()
    yield made
    made.remove()


@pytest.fixture
def flags(webhook: Webhook) -> tuple[str, ...]:
    """The operator's, to serve the webhook. Without a kubelet no pod starts."""
    return (*webhook.flags, "--max-waiting-pods=1000")


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Any]:
    """Waits, bounded, until a check is true."""
    return eventually


@pytest.fixture
def manifest() -> dict[str, Any]:
    """The smallest service, as a person would write it, on no node even where there is one."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "examples/tiny.yaml").read_text())
    loaded["spec"]["podTemplate"] = {"spec": {"nodeSelector": {"plimsoll.dev/no-node": "true"}}}
    return loaded
