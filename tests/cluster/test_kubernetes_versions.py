"""The operator on each supported Kubernetes: it writes ``research/bench/results/kubernetes.json``.

A control plane of the version runs the tests that depend most on it: definitions and their rules,
admission policies, ownership, policies of pods, and the chart. ``docs/support.md`` shows what ran.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import result
from plimsoll_api.times import format_rfc3339
from plimsoll_cli.cluster.doctor import MAX_TESTED_KUBERNETES_MINOR, MIN_KUBERNETES_MINOR
from plimsoll_cli.figures import find_commit
from tests.lab import binaries
from tests.lab.errors import MissingError

ROOT = Path(__file__).parents[2]
CORE = (
    "cluster/operator/test_lifecycle.py", "cluster/operator/test_bad_specs.py",
    "cluster/operator/test_supervision_policy.py", "cluster/test_admission_policy.py",
    "cluster/test_operator_policy.py", "cluster/test_pod_template_policy.py",
    "cluster/test_chart_release.py",
)  # fmt: skip
TIMEOUT_S = 1800


def minor(version: str) -> int:
    return int(version.split(".")[1])


def test_each_supported_minor_version_is_tested() -> None:
    assert sorted(map(minor, binaries.VERSIONS)) == [
        *range(MIN_KUBERNETES_MINOR, MAX_TESTED_KUBERNETES_MINOR + 1)
    ]


@pytest.mark.long
@pytest.mark.parametrize("version", binaries.VERSIONS)
def test_the_operator_runs_on_it(version: str, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if version != binaries.VERSION:
        try:
            environment["KUBEBUILDER_ASSETS"] = str(binaries.assets(version))
        except MissingError as missing:
            pytest.skip(str(missing))
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long",
        f"--basetemp={tmp_path / 'run'}", *(f"tests/{file}" for file in CORE),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    *_, summary = done.stdout.splitlines() or [""]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|skipped|failed)", summary)}
    print(done.stdout[-6000:])
    assert done.returncode == 0, f"Kubernetes {version}: {summary}"

    ran = {
        "version": version,
        "date": format_rfc3339(time.time())[:10],
        "commit": find_commit(),
        **counts,
    }
    _, known = result.earlier(result.RESULTS / "kubernetes.json")
    rows = known | {f"1.{minor(version)}": ran}
    result.publish("kubernetes", {"versions_count": len(rows)}, dict(sorted(rows.items())))
