"""What the documents tell a person to run on a cluster is run on a real API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docs.tools import manifests
from docs.tools.blocks import ROOT, Block, blocks, documents
from tests.lab.kube import Kube
from tests.lab.lab import Lab, namespace

FIRST = ROOT / "docs" / "quickstart.md"
"""It makes what the other pages speak of."""
MARKED = [
    block
    for path in sorted(documents(), key=lambda path: path != FIRST)
    for block in blocks(path, "sh")
    if block.run == "cluster"
]


def test_commands_run_in_the_order_of_the_page(cluster: Lab, tmp_path: Path) -> None:
    assert len(MARKED) >= 5
    with namespace(cluster.kube) as kube:
        config = yaml.safe_load(cluster.kubeconfig.read_text())
        config["contexts"][0]["context"]["namespace"] = kube.namespace
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(config))
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": programs}
        try:
            for block in MARKED:
                _run(block, env, tmp_path)
        finally:
            # The lab is every test's: its CRDs, namespace and roles stay as they were.
            system = Kube(kube.kubectl, kube.kubeconfig, "plimsoll-system")
            for name in ("operator", "admission-policy"):
                system("delete", "--ignore-not-found", "-f", str(ROOT / "config" / f"{name}.yaml"))


def _run(block: Block, env: dict[str, str], folder: Path) -> None:
    script = block.text.replace("/tmp/", f"{folder}/")
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.place}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_the_api_server_takes_the_manifests(cluster: Lab, path: Path) -> None:
    objects = manifests.of(path)
    if objects:
        text = yaml.safe_dump_all(objects)
        kube = cluster.kube
        applied = kube("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
        assert applied.count("(server dry run)") == len(objects)
