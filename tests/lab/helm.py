"""Helm, and the chart of this checkout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.lab.errors import LabError
from tests.lab.images import ROOT
from tests.lab.kube import Kube

CHART = ROOT / "charts" / "plimsoll"
RELEASE = "plimsoll"
TIMEOUT_S = 180


class Helm:
    """Helm in the namespace of ``kube``."""

    def __init__(self, binary: str | Path, kube: Kube) -> None:
        self._prefix = [
            str(binary), f"--kubeconfig={kube.kubeconfig}", f"--namespace={kube.namespace}",
        ]  # fmt: skip

    def __call__(self, *arguments: str, values: dict[str, Any] | None = None) -> str:
        """What it printed. LabError with what it said where it failed."""
        given = ["--values=-"] if values is not None else []
        done = subprocess.run(
            [*self._prefix, *arguments, *given],
            input=json.dumps(values),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise LabError(f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout


def values(operator: str, engine: str, supervisor: str) -> dict[str, Any]:
    """The chart's values for images by name (REPOSITORY:TAG)."""
    repository, _, tag = operator.rpartition(":")
    registry, _, name = repository.rpartition("/")
    prefix = name.removesuffix("-operator")
    images = {"registry": registry, "prefix": prefix, "tag": tag}
    return {"images": images | {"engine": engine, "supervisor": supervisor}}
