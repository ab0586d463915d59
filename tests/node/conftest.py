"""A service on a real node: namespace, operator, claims and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import images
from tests.lab.kube import Kube
from tests.lab.lab import Lab, mounted, namespace
from tests.lab.operator import Operator, chart_kubeconfig, operator_kubeconfig
from tests.lab.services import image_flags, on_cpu
from tests.lab.webhook import Webhook

SERVICE = "leaky"
ADMISSION_POLICY = images.ROOT / "config" / "admission-policy.yaml"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, readable by every UID."""
    folder = tmp_path_factory.mktemp("model")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    images.checkpoint(folder)
    return folder


@pytest.fixture
def kube(node: Lab, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A namespace of the test's own that admits only restricted pods."""
    with namespace(node.kube, restricted=True) as kube:
        failed = request.session.testsfailed
        yield kube
        if request.session.testsfailed > failed:
            print(kube.dump())


@pytest.fixture
def operator(node: Lab, kube: Kube, tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    """Starts operators on the test's namespace, with more flags where some are given."""
    account = operator_kubeconfig(node.kube, tmp_path / "kubeconfig")
    started: list[Operator] = []

    def start(*flags: str) -> Operator:
        started.append(Operator(account, kube.namespace, *image_flags(node), *flags, warm=True))
        return started[-1]

    yield start
    for operator in started:
        operator.stop()


@pytest.fixture
def charted(
    request: pytest.FixtureRequest, node: Lab, kube: Kube, tmp_path: Path
) -> Iterator[Callable[[], Operator]]:
    """Starts operators with the rights that the chart gives them: the ClusterRole of one for all
    namespaces, or the Role of one for this namespace and no more."""
    named = [kube.namespace] if request.param == "one namespace" else []
    account = chart_kubeconfig(node.kube, tmp_path / "kubeconfig", *named)
    started: list[Operator] = []

    def start() -> Operator:
        flags = image_flags(node)
        started.append(Operator(account, "".join(named), *flags, warm=True))
        return started[-1]

    yield start
    for operator in started:
        operator.stop()


@pytest.fixture
def manifest(kube: Kube, checkpoint: Path) -> Callable[..., dict[str, Any]]:
    """An InferenceService with an injected fault, on claims of the namespace."""

    def make(inject: str, **supervision: Any) -> dict[str, Any]:
        model = mounted(kube, "model", checkpoint)
        made = on_cpu(SERVICE, model)
        made["spec"]["engine"]["args"].append("--allow-inject")
        made["spec"]["engine"]["env"] = [{"name": "PLIMSOLL_INJECT", "value": inject}]
        made["spec"] |= {
            "memory": {"host": {"growthBudget": "64Mi", "window": "1h"}, "warmup": "5s"},
            "supervision": {"mode": "Recover", **supervision},
        }
        return made

    return make


@pytest.fixture
def webhook(node: Lab, operator: Callable[..., Operator]) -> Iterator[tuple[str, ...]]:
    """The chart's objects for the webhook, and its admission policies; the operator's flags."""
    if not isinstance(node, Lab):
        pytest.skip("the API server of another cluster does not reach a webhook on this machine")
    made = Webhook(node.kube)
    made.install()
    node.kube("apply", "-f", str(ADMISSION_POLICY))
    yield made.flags
    node.kube("delete", "-f", str(ADMISSION_POLICY))
    made.remove()
