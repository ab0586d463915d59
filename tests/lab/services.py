"""What the services of the lab have in common."""

from __future__ import annotations

from typing import Any

from tests.lab.lab import ExistingCluster, Lab


def on_cpu(name: str, claim: str) -> dict[str, Any]:
    """An InferenceService of the tiny checkpoint on the claim, computed by the CPU."""
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": f"pvc://{claim}/tiny"},
            "engine": {
                "args": ["--device=cpu", "--dtype=float32"],
                "resources": {"limits": {"memory": "4Gi"}},
                "startupTimeout": "8m",
            },
        },
    }


def image_flags(lab: Lab | ExistingCluster) -> list[str]:
    """Flags of an operator for the lab's images."""
    engine, supervisor = lab.engine_image, lab.supervisor_image
    return ["--engine-image", engine, "--supervisor-image", supervisor]
