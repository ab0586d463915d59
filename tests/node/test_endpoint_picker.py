"""Two replicas behind the real endpoint picker, asked as Envoy asks it.

It finds them through the InferencePool that the operator makes, reads the metrics of our engine,
and leaves out a replica that the supervisor takes out of service.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from plimsoll_cli.main import app
from tests.cluster.test_integrations import define
from tests.lab import binaries, endpoint_picker
from tests.lab.endpoint_picker import EndpointPicker
from tests.lab.errors import MissingError
from tests.lab.images import ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.node.service import SERVICE, Manifest, plain, pods, ready
from tests.node.streams import WHOLE, Streams
from tests.node.supervised import ready_since
from tests.node.visits import Visits

EXAMPLE = ROOT / "examples" / "integrations" / "gateway.yaml"
SEEN_S = 20.0
"""Seconds in which a change of load or readiness must have reached the picker."""
PICKS = 20
NUMBERS = itertools.count()


@pytest.fixture
def kinds(node: Lab, kube: Kube) -> Iterator[None]:
    if not isinstance(node, Lab):
        pytest.skip("the picker runs beside the lab's own API server")
    try:
        endpoint_picker.build()
    except MissingError as missing:
        pytest.skip(str(missing))
    defined = define(node.kube, binaries.GATEWAY, binaries.INFERENCE)
    yield
    node.kube("delete", "crd", *defined)


@pytest.fixture
def picker(node: Lab, kube: Kube, kinds: None) -> Iterator[EndpointPicker]:
    made = EndpointPicker(node, kube.namespace, SERVICE)
    made.start()
    yield made
    made.stop()


def request(**more: Any) -> dict[str, Any]:
    """A short request with a prompt of its own: no replica has a part of it in its cache."""
    return {"model": SERVICE, "prompt": f"{next(NUMBERS)}", "max_tokens": 4, **more}


def plimsoll(kube: Kube, *arguments: str) -> None:
    flags = ["--kubeconfig", str(kube.kubeconfig), "-n", kube.namespace, "--yes"]
    done = CliRunner().invoke(app, [*arguments, *flags])
    assert done.exit_code == 0, done.exception or done.output


def is_ready(kube: Kube, pod: str) -> bool:
    return bool(ready_since(kube.get("pod", pod) or {}))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_picker_chooses_by_load_and_leaves_out_what_is_out_of_service(
    kube: Kube,
    operator: Callable[..., Operator],
    manifest: Manifest,
    picker: EndpointPicker,
) -> None:
    operator()
    gateway = yaml.safe_load(EXAMPLE.read_text())["spec"]["gateway"]
    service = plain(manifest, replicas=2, gateway=gateway)
    # One request at a time, so that others wait.
    service["spec"]["engine"]["args"].append("--max-num-seqs=1")
    kube.apply(service)
    ready(kube)
    one, other = pods(kube)
    port = one["spec"]["containers"][0]["ports"][0]["containerPort"]
    names = [pod["metadata"]["name"] for pod in (one, other)]
    addresses = [f"{pod['status']['podIP']}:{port}" for pod in (one, other)]

    def picked() -> set[str]:
        return {picker.pick(request()) for _ in range(PICKS)}

    def value(name: str, **labels: str) -> float:
        found = picker.samples(name)
        return sum(one.value for one in found if labels.items() <= one.labels.items())

    def queue(pod: str) -> float:
        return value("inference_pool_per_pod_queue_size", model_server_pod=f"{pod}-rank-0")

    def waits(pod: str) -> bool:
        return queue(pod) > 0

    eventually(lambda: value("inference_pool_ready_pods") == 2, "the picker has both", SEEN_S)
    eventually(lambda: picked() == set(addresses), "both are chosen while both are idle", SEEN_S)
    for loaded, idle in ((0, 1), (1, 0)):
        with Streams(f"http://{addresses[loaded]}", SERVICE) as streams:
            eventually(partial(waits, names[loaded]), "it sees waiting requests", SEEN_S)
            eventually(lambda: value("inference_pool_average_running_requests") > 0, "running")
            eventually(lambda: value("inference_pool_average_kv_cache_utilization") > 0, "KV")
            assert queue(names[idle]) == 0
            assert picked() == {addresses[idle]}
        assert streams.failures == []

    chosen: list[str] = []

    def ask() -> None:
        body = request()
        address = picker.pick(body)
        chosen.append(address)
        answer = httpx.post(f"http://{address}/v1/completions", json=body, timeout=60)
        if answer.status_code != 200:
            raise ValueError(f"{address}: HTTP {answer.status_code}: {answer.text[:300]}")
        assert answer.json()["choices"][0]["finish_reason"] in WHOLE

    with Visits(ask) as visits:
        plimsoll(kube, "restart", names[0])
        eventually(partial(is_ready, kube, names[0]), "it is back after its restart", 120)
        eventually(lambda: picked() == set(addresses), "both are chosen again", SEEN_S)
        plimsoll(kube, "drain", names[0], "--deadline", "30s")
        eventually(lambda: not is_ready(kube, names[0]), "it is out of service", SEEN_S)
        eventually(lambda: picked() == {addresses[1]}, "it is out of the pool", SEEN_S)
        # The drained one is idle, the other has all the load: only the readiness speaks.
        with Streams(f"http://{addresses[1]}", SERVICE) as streams:
            eventually(partial(waits, names[1]), "the other is loaded", SEEN_S)
            chosen.clear()
            assert picked() == {addresses[1]}
        assert set(chosen) <= {addresses[1]}
        plimsoll(kube, "resume", names[0])
        eventually(partial(is_ready, kube, names[0]), "it is back in service", SEEN_S)
        eventually(lambda: addresses[0] in picked(), "it is chosen again", SEEN_S)
    told = f"{visits.answered} requests through the picker, {len(visits.failures)} failed"
    print(told)
    assert visits.failures == [], "\n".join([told, *visits.failures])
