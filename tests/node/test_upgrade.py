"""An upgrade from the release before, and the way back, on a real node.

``releases/0.1.0.tar.xz`` has what that release installs: its packages, definitions and admission
policy. A service runs with its engine and its supervisor, an incident is open, and streams flow.
"""

from __future__ import annotations

import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import images
from tests.lab.kube import Kube, eventually
from tests.lab.lab import CRDS, Lab
from tests.lab.operator import Operator, operator_kubeconfig
from tests.lab.services import image_flags
from tests.node.service import READY_S, SERVICE, Manifest, condition, pods, ready, streaming
from tests.node.test_cli_actions import plimsoll

RELEASE = Path(__file__).parent / "releases" / "0.1.0.tar.xz"
ENGINE, SUPERVISOR = "localhost/plimsoll-engine:0.1.0", "localhost/plimsoll-supervisor:0.1.0"
OLD = ("--engine-image", ENGINE, "--supervisor-image", SUPERVISOR)
LEAK = "request_cycle:payload_bytes=2Mi"
INCIDENT_S = 240
POLICY = "admission-policy.yaml"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(RELEASE) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(node: Lab, release: Path) -> Iterator[Path]:
    """The release before is installed; today's definitions are back afterwards."""
    if not isinstance(node, Lab):
        pytest.skip("the node of another cluster has no image of the release before")
    assert node.node is not None
    for name, module in ((ENGINE, "plimsoll_engine"), (SUPERVISOR, "plimsoll_sidecar.launcher")):
        made = images.released_image(node.home, release, name, ["python", "-m", module])
        node.node.load(made)
        made.unlink()
    define(node.kube, release / "crds", release / "config")
    yield release
    node.kube("delete", "--ignore-not-found", "-f", str(images.ROOT / "config" / POLICY))
    node.install_crds()


def define(admin: Kube, crds: Path, config: Path) -> None:
    """Apply definitions and the admission policy, as an upgrade does first."""
    for file in (*sorted(crds.glob("*.plimsoll.dev.yaml")), config / POLICY):
        admin("apply", "--server-side", "--force-conflicts", "-f", str(file))
    time.sleep(2)  # the API server takes up a policy that has changed within a second


def incidents(kube: Kube) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["uid"]: one for one in kube.list("leakincidents")}


def uids(kube: Kube) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods(kube)}


def acted(kube: Kube, known: set[str]) -> set[str]:
    """Have the supervisor write an incident now, by a trim; every incident there is then."""
    (pod,) = pods(kube)
    done = plimsoll(kube, "trim", pod["metadata"]["name"], "--yes")
    assert done.exit_code == 0, done.output

    def told() -> bool:
        new = [one for uid, one in incidents(kube).items() if uid not in known]
        return any(one["spec"]["kind"] == "ManualAction" for one in new)

    eventually(told, "the supervisor's incident passes the admission policy", 60)
    return set(incidents(kube))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_upgrade_and_its_rollback_lose_nothing(
    node: Lab, kube: Kube, manifest: Manifest, old: Path, tmp_path: Path
) -> None:
    account = operator_kubeconfig(node.kube, tmp_path / "kubeconfig")
    running = Operator(account, kube.namespace, *OLD, code=old)
    try:
        kube.apply(manifest(LEAK, mode="Observe"))
        ready(kube)
        before = uids(kube)
        with streaming(kube) as streams:
            eventually(lambda: incidents(kube), "an incident is open", INCIDENT_S)
            known = set(incidents(kube))

            # The operator, with pods of the release before.
            define(node.kube, CRDS, images.ROOT / "config")
            running.stop()
            away = time.monotonic()
            running = Operator(account, kube.namespace, *image_flags(node))
            away = time.monotonic() - away
            known = acted(kube, known)
            eventually(lambda: condition(kube, "Ready") == "True", "it is ready", 60)
            assert uids(kube) == before, "the upgrade of the operator rolls no pods"

            # The pods.
            kube.patch("plinf", SERVICE, {"spec": {"restart": {"id": "new"}}})
            eventually(lambda: not uids(kube) & before, "new pods", 2 * READY_S)
            ready(kube)
            containers = pods(kube)[0]["spec"]["containers"]
            assert {one["image"] for one in containers} == {node.engine_image}
            assert known <= set(incidents(kube)), "incidents of pods that are gone stay"
            known = acted(kube, known)

            # Back, with pods of the new release.
            after = uids(kube)
            define(node.kube, old / "crds", old / "config")
            running.stop()
            running = Operator(account, kube.namespace, *OLD, code=old)
            known = acted(kube, known)
            finished = streams.finished
            eventually(lambda: streams.finished >= finished + 2, "it serves", 60)
            assert condition(kube, "Ready") == "True"
            assert uids(kube) == after, "neither does the rollback"
    finally:
        running.stop()
    print(
        f"{streams.finished} requests, {len(streams.failures)} failed, longest silence"
        f" {max(streams.pauses):.1f} s, {len(known)} incidents kept, {away:.1f} s without operator"
    )
    assert streams.failures == []
