"""A cluster from the files of a release alone: images, chart and no registry."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab import __main__ as by_hand
from tests.lab import binaries, build
from tests.lab.errors import MissingError
from tests.lab.helm import RELEASE, Helm
from tests.lab.images import ENGINE, ROOT
from tests.lab.kube import Kube
from tests.lab.lab import new_lab
from tests.node.test_lab_by_hand import adopt

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PARTS = ("operator", "supervisor")
VALUES = {"images": {"registry": "localhost", "pullPolicy": "Never", "engine": ENGINE}}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dist/`` of a clone, with archives of two images."""
    tmp_path = tmp_path_factory.mktemp("release")
    try:
        builder = build.builder(tmp_path)
        helm = Path(binaries.helm(max(binaries.HELM)))
    except MissingError as missing:
        pytest.skip(str(missing))
    tree = tmp_path / "tree"
    environment = os.environ | {"PATH": f"{helm.parent}{os.pathsep}{os.environ['PATH']}"}

    def run(*command: str) -> None:
        done = subprocess.run(
            command, cwd=tree if tree.exists() else ROOT, env=environment, text=True,
            capture_output=True, timeout=1800,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"

    run("git", "clone", "--quiet", str(ROOT), str(tree))
    run("make", *(f"image-{part}" for part in PARTS), f"BUILDER={builder}", "REGISTRY=localhost")
    names = [f"localhost/plimsoll-{part}:{VERSION}" for part in PARTS]
    run(sys.executable, "requirements/release.py", VERSION, *names, f"--builder={builder}")
    return tree / "dist"


@pytest.fixture
def kube(node_tier: None, dist: Path) -> Iterator[Kube]:
    """A cluster whose node has these images, and what the stand-in for an engine needs."""
    lab = new_lab(node=True)
    try:
        lab.start(crds=False)
        lab.start_node()
        assert lab.node is not None
        for part in PARTS:
            lab.node.load(dist / f"plimsoll-{part}-{VERSION}.oci.tar")
        yield lab.kube
    finally:
        lab.stop()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_it_starts_without_a_registry(kube: Kube, dist: Path) -> None:
    chart = dist / f"plimsoll-{VERSION}.tgz"
    kube("create", "namespace", by_hand.SYSTEM)
    system = replace(kube, namespace=by_hand.SYSTEM)
    release = Helm(binaries.helm(max(binaries.HELM)), system)
    release("install", RELEASE, str(chart), "--wait", "--timeout=2m", values=VALUES)
    adopt(kube, release, chart)
    (operator,) = system.list("pods", "app.kubernetes.io/component=operator")
    supervised = kube.list("pods", "plimsoll.dev/policy=engines")
    images = {
        container["image"]
        for pod in (operator, *supervised)
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
    }
    assert {f"localhost/plimsoll-{part}:{VERSION}" for part in PARTS} <= images


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_bills_of_materials_name_every_package(dist: Path) -> None:
    """Those of Debian as dpkg knows them in the image, and of Python as they lie in it."""
    for part, lock in zip(PARTS, ("operator", "sidecar"), strict=True):
        listed = json.loads((dist / f"plimsoll-{part}.cdx.json").read_text())["components"]
        urls = [one["purl"] for one in listed]
        locked = re.findall(r"^(\S+)==", (ROOT / f"requirements/{lock}.txt").read_text(), re.M)
        python = {one["name"] for one in listed if one["purl"].startswith("pkg:pypi/")}
        assert python == {*locked, "plimsoll"}
        debian = {one["name"] for one in listed if one["purl"].startswith("pkg:deb/debian/")}
        assert {"dpkg", "libc6", "python3-minimal", "ca-certificates"} <= debian
        assert len(debian) > 80
        assert len(urls) == len(set(urls))
