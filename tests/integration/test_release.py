"""``make release`` in a checkout of its own: files of one version that say what is in them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.lab import binaries
from tests.lab.errors import MissingError

ROOT = Path(__file__).parents[2]
VERSION = "9.9.9"
NO_INDEX = "error sending request"
KREW = "sigs.k8s.io/krew/cmd/krew@v0.4.3"


@pytest.mark.long
def test_a_release_has_one_version_and_lists_its_packages(tmp_path: Path) -> None:
    try:
        helm = binaries.helm(4)
    except MissingError as missing:
        pytest.skip(str(missing))
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True, timeout=60)
    project = tree / "pyproject.toml"
    project.write_text(
        re.sub(r'^version = ".*"', f'version = "{VERSION}"', project.read_text(), flags=re.M)
    )
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(re.sub(r"(?m)^## \[.*", f"## [{VERSION}]", changelog.read_text(), count=1))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(helm).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [sys.executable, *arguments], cwd=tree, env=os.environ | {"PATH": path},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    refused = run("requirements/release.py", "9.9.8")
    assert (refused.returncode, f"version {VERSION}" in refused.stderr) == (1, True)
    refused = run("requirements/release.py", VERSION)
    assert "run python charts/generate.py" in refused.stderr, "the chart has the old version"
    assert run("charts/generate.py").returncode == 0
    done = run("requirements/release.py", VERSION)
    if NO_INDEX in done.stderr:
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr

    dist = tree / "dist"
    names = {one.name for one in dist.iterdir()}
    assert names >= {
        f"plimsoll-{VERSION}-py3-none-any.whl", f"plimsoll-{VERSION}.tar.gz",
        f"plimsoll-{VERSION}.tgz", "plimsoll.yaml", "plimsoll-crds.yaml", "NOTES.md", "SHA256SUMS",
        "kubectl-plimsoll.tar.gz", "plimsoll.krew.yaml",
    }  # fmt: skip
    for line in (dist / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
        names.remove(name)
    assert names == {"SHA256SUMS"}
    manifests = [one for one in yaml.safe_load_all((dist / "plimsoll.yaml").read_text()) if one]
    (operator,) = (one for one in manifests if one["kind"] == "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"plimsoll-operator:{VERSION}"
    for part, lock in (("operator", "operator"), ("supervisor", "sidecar"), ("engine", "engine")):
        listed = json.loads((dist / f"plimsoll-{part}.cdx.json").read_text())["components"]
        locked = re.findall(r"^(\S+)==", (tree / f"requirements/{lock}.txt").read_text(), re.M)
        assert {one["name"] for one in listed} == {*locked, "plimsoll"}
    krew = yaml.safe_load((dist / "plimsoll.krew.yaml").read_text())
    (platform,) = krew["spec"]["platforms"]
    archive = dist / platform["uri"].rpartition("/")[2]
    assert f"/v{VERSION}/" in platform["uri"]
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == platform["sha256"]
    krew_takes_it(dist, tmp_path)


def krew_takes_it(dist: Path, home: Path) -> None:
    """Install the plugin from the files, and run it beside a command line that is already here."""
    go = shutil.which("go")
    if go is None:
        return
    tools = home / "tools"
    tools.mkdir()
    (tools / "uvx").write_text('#!/bin/sh\necho "uvx $@"\n')
    (tools / "uvx").chmod(0o755)
    environment = os.environ | {
        "KREW_ROOT": str(home / "krew"), "CGO_ENABLED": "0",
        "PATH": f"{tools}{os.pathsep}{home}/krew/bin{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    files = f"--manifest={dist}/plimsoll.krew.yaml", f"--archive={dist}/kubectl-plimsoll.tar.gz"
    done = subprocess.run(
        [go, "run", KREW, "install", *files], env=environment, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert "Installed plugin: plimsoll" in done.stderr, done.stderr
    told = subprocess.run(
        ["kubectl", "plimsoll", "top"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert told.stdout == f"uvx --quiet --from plimsoll[cli]=={VERSION} plimsoll top\n", told.stderr
