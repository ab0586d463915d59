"""``examples/start/hub.yaml`` on a node: the one example for a start that needs no GPU.

The node has no network, so a stand-in for the hub answers on this machine, with a tiny model under
the name of the example's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration.test_model_download import serving
from tests.lab.images import ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator

EXAMPLE = ROOT / "examples" / "start" / "hub.yaml"


@pytest.mark.long
def test_a_model_of_the_hub_is_served(
    node: Lab, kube: Kube, operator: Callable[..., Operator], checkpoint: Path
) -> None:
    if not isinstance(node, Lab):
        pytest.skip("the pods of another cluster do not reach a hub on this machine")
    operator()
    service = yaml.safe_load(EXAMPLE.read_text())
    repository = service["spec"]["model"]["uri"].removeprefix("hf://")
    files = {
        path.name: path.read_bytes() for path in (checkpoint / "tiny").iterdir() if path.is_file()
    }
    with serving(node.plane.slot.host_ip, repository, files) as (url, asked):
        service["spec"]["engine"]["env"] = [{"name": "HF_ENDPOINT", "value": url}]
        kube.apply(service)
        wait = ("wait", "plinf/smol", "--for=condition=Ready", "--timeout=30s")
        eventually(lambda: kube.run(*wait).returncode == 0, "the example is ready", 300)
    assert any("/resolve/" in path for path in asked)
    address = (kube.get("service", "smol") or {})["spec"]["clusterIP"]
    body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    url = f"http://{address}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=30, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == 4
