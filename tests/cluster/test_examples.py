"""``examples/start``: the API server takes each object, and each engine gets a supervisor.

The quick start with kind and k3d runs as well, with real helm and kubectl. Stand-ins of kind, k3d
and make note what they are asked for.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from docs.tools.blocks import ROOT, blocks
from plimsoll_cli.main import app
from tests.lab import binaries
from tests.lab.errors import MissingError
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace, new_lab

HERE = f"tests/cluster/{Path(__file__).name}"
KIND, K3D = (one.text for one in blocks(ROOT / "docs" / "quickstart.md", "sh") if one.run == HERE)
IMAGES = [f"plimsoll-{part}:dev" for part in ("operator", "supervisor", "engine")]
STAND_IN = '#!/bin/sh\necho "${0##*/} $*" >> "$CALLS"\n'
FILES = sorted((ROOT / "examples" / "start").glob("*.yaml"))
FOREIGN = {"serving.kserve.io"}
"""API groups whose definitions are not on Go's proxy, so the lab has none."""
GROUPS = "leaderworkersets.leaderworkerset.x-k8s.io"


def test_an_example_is_there_for_each_way_to_start() -> None:
    assert [path.stem for path in FILES] == ["hub", "kserve", "lws", "sglang", "vllm"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_engine_of_an_example_gets_a_supervisor(path: Path) -> None:
    done = CliRunner().invoke(app, ["validate", str(path)])
    assert done.exit_code == 0, done.output
    documents = list(yaml.safe_load_all(path.read_text()))
    policies = [one for one in documents if one["kind"] == "SupervisionPolicy"]
    for policy in policies:
        ((key, value),) = policy["spec"]["selector"]["matchLabels"].items()
        labels = [line.strip() for line in path.read_text().splitlines() if "labels: {" in line]
        assert f"labels: {{{key}: {value}}}" in labels, "the policy selects the example's pods"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_api_server_takes_an_example(cluster: Lab, path: Path) -> None:
    documents = [
        one
        for one in yaml.safe_load_all(path.read_text())
        if one["apiVersion"].partition("/")[0] not in FOREIGN
    ]
    if any(one["kind"] == "LeaderWorkerSet" for one in documents):
        try:
            _, manifests = binaries.leader_worker_set()
        except MissingError as missing:
            pytest.skip(str(missing))
        cluster.kube("apply", "--server-side", "-f", str(manifests / "crd" / "bases"))
        cluster.kube.established(GROUPS)
    with namespace(cluster.kube) as kube:
        text = yaml.safe_dump_all(documents)
        flags = ("--dry-run=server", "--validate=strict", "-f", "-")

        def applied() -> str:
            return kube("apply", *flags, stdin=text)

        said = str(eventually(applied, "the API server serves the kinds"))
        assert said.count("(server dry run)") == len(documents)


def test_the_quick_start_with_kind_and_k3d(cluster: Lab, helm: str, tmp_path: Path) -> None:
    """``kind create`` and ``load``, ``k3d cluster`` and ``image`` are noted; ``helm install``,
    ``kubectl wait`` and ``kubectl apply`` run."""
    calls = tmp_path / "calls"
    for name in ("kind", "k3d", "make"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    lab = new_lab(node=False)
    lab.start(crds=False)
    try:
        tools = os.pathsep.join([str(tmp_path), str(lab.tools(helm=Path(helm)))])
        env = os.environ | {
            "KUBECONFIG": str(lab.kubeconfig), "CALLS": str(calls),
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        for script in (KIND, K3D):
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", script], env=env, cwd=ROOT, timeout=120,
                capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        assert calls.read_text().splitlines() == [
            "kind create cluster", "make images TAG=dev",
            " ".join(["kind load docker-image", *IMAGES]),
            "k3d cluster create", " ".join(["k3d image import", *IMAGES]),
        ]  # fmt: skip
        system = Kube(lab.kube.kubectl, lab.kubeconfig, "plimsoll-system")
        deployment = system.get("deployment", "plimsoll")
        assert deployment is not None
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == IMAGES[0], "what was loaded is what runs"
        assert container.get("imagePullPolicy") != "Always", "the node has it, no registry does"
        assert all(any(image in one for one in container["args"]) for image in IMAGES[1:])
        assert Kube(lab.kube.kubectl, lab.kubeconfig, "default").get("plinf", "smol")
    finally:
        lab.stop()
