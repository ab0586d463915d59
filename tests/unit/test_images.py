"""``make images``: what is built, by which tool, and under which names.

That the targets build is shown by the node tests, whose images come from the same Dockerfile.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("operator", "supervisor", "engine")


def make(tmp_path: Path, builder: str, *variables: str) -> list[str]:
    """The calls of the builder, which only writes them down."""
    tools, log = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    (tools / builder).write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    (tools / builder).chmod(0o755)
    done = subprocess.run(
        ["make", "images", *variables],
        cwd=ROOT, env={"PATH": f"{tools}:/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_each_target_gets_the_name_that_the_chart_pulls(tmp_path: Path, builder: str) -> None:
    calls = make(tmp_path, builder, f"BUILDER={builder}", "REGISTRY=registry.example/team", "TAG=7")
    assert [re.findall(r"--target=(\S+)", call) for call in calls] == [[part] for part in PARTS]
    for part, call in zip(PARTS, calls, strict=True):
        assert f"--tag=registry.example/team/plimsoll-{part}:7" in call
        assert "push" not in call


def test_images_of_several_platforms_are_pushed_as_one(tmp_path: Path) -> None:
    platforms = "linux/amd64,linux/arm64"
    calls = make(tmp_path, "podman", "BUILDER=podman", f"PLATFORMS={platforms}", "PUSH=1",
                 "IMAGES=supervisor", "TAG=7")  # fmt: skip
    assert calls == [
        f"build --platform={platforms} --manifest=plimsoll-supervisor:7 --target=supervisor .",
        "manifest push --all plimsoll-supervisor:7 docker://plimsoll-supervisor:7",
    ]


def test_the_base_is_pinned_by_its_digest() -> None:
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", (ROOT / "Dockerfile").read_text(), re.M)
