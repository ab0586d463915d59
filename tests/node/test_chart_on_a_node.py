"""The chart as a person installs it: the operator in a pod, under the restricted standard."""

from __future__ import annotations

import pytest

from tests.lab import binaries
from tests.lab.helm import CHART, RELEASE, Helm, values
from tests.lab.kube import Kube, eventually
from tests.lab.lab import ExistingCluster, Lab
from tests.node.service import Manifest, plain, ready, streaming


@pytest.mark.long
def test_installed_by_helm_it_serves_and_its_test_passes(
    kube: Kube, node: Lab | ExistingCluster, manifest: Manifest
) -> None:
    """The lab has no DNS: neither the operator nor the chart's own test may need it."""
    release = Helm(binaries.helm(max(binaries.HELM)), kube)
    chosen = values(node.load_operator(), node.engine_image, node.supervisor_image)
    # The lab has the definitions already.
    chosen |= {"namespaces": [kube.namespace], "crds": {"enabled": False}}
    chosen["admissionPolicy"] = {"enabled": False}
    release("install", RELEASE, str(CHART), "--wait", "--timeout=2m", values=chosen)
    try:
        kube.apply(plain(manifest))
        ready(kube)
        with streaming(kube, 1) as streams:
            eventually(lambda: streams.finished, "it serves", 60)
        assert streams.failures == []
        assert "Phase:          Succeeded" in release("test", RELEASE, "--timeout=1m")
        (operator,) = kube.list("pods", "app.kubernetes.io/component=operator")
        assert operator["status"]["containerStatuses"][0]["restartCount"] == 0
    finally:
        release("uninstall", RELEASE, "--wait", "--timeout=1m")
