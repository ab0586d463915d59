"""``examples/integrations``: a real API server that has the projects' definitions takes them."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools.blocks import ROOT
from plimsoll_operator.kinds import OPTIONAL, InvalidSpec
from plimsoll_operator.plans.service import parse, reconcile
from tests.cluster.operator.test_crd_fuzz import IMAGES, SPEC, value
from tests.lab import binaries
from tests.lab.definitions import Definitions
from tests.lab.errors import MissingError
from tests.lab.kube import Kube, eventually
from tests.lab.lab import namespace, new_lab
from tests.lab.objects import Refused

FILES = sorted((ROOT / "examples" / "integrations").glob("*.yaml"))


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """A control plane of its own: other tests need clusters without these kinds."""
    lab = new_lab(node=False)
    lab.start()
    try:
        define(lab.kube, *binaries.DEFINITIONS)
        with namespace(lab.kube) as found:
            yield found
    finally:
        lab.stop()


def files_of(module: str) -> list[Path]:
    """The resource definitions of a release."""
    try:
        files = sorted(binaries.module(module).glob(binaries.DEFINITIONS[module]))
    except MissingError as missing:
        pytest.skip(str(missing))
    assert files, f"{module} has no {binaries.DEFINITIONS[module]}"
    return files


def define(kube: Kube, *modules: str) -> list[str]:
    """Load the definitions of these releases; return their names once they are served."""
    flags = [
        argument for one in modules for path in files_of(one) for argument in ("-f", str(path))
    ]
    applied = kube("apply", "--server-side", "-o", "name", *flags).split()
    found = [name.partition("/")[2] for name in applied]
    kube.established(*found)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_api_server_takes_an_example(kube: Kube, path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))

    def applied() -> str:
        return kube("apply", "--dry-run=server", "--validate=strict", "-f", str(path))

    said = str(eventually(applied, "the API server serves the kinds"))
    assert said.count("(server dry run)") == len(documents)


NEW = ("gateway", "autoscaling")
COUNTS = (300, pytest.param(5000, marks=pytest.mark.long))


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_rendered_from_an_admitted_spec_is_taken(
    definitions: Definitions, count: int
) -> None:
    """Specs at random with the fields that other projects' objects are made of."""
    modules = (binaries.GATEWAY, binaries.INFERENCE, binaries.KEDA)
    theirs = Definitions(
        binaries.kubelab(build=False), [one for m in modules for one in files_of(m)]
    )
    dice = random.Random(int(os.environ.get("PLIMSOLL_FUZZ_SEED", "1")))
    found: Counter[str] = Counter()
    try:
        for index in range(count):
            spec: dict[str, Any] = {"model": {"uri": "file:///m"}}
            spec |= {name: value(SPEC["properties"][name], dice) for name in NEW}
            if index % 2:
                spec.pop(NEW[index // 2 % len(NEW)])
            body = {
                "apiVersion": "plimsoll.dev/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": f"fuzz-{index}", "namespace": "default", "uid": "u"},
                "spec": spec,
            }
            try:
                item = definitions.create(body)
                plan = reconcile(parse(item), {}, [], [], IMAGES)
            except (Refused, InvalidSpec):
                found["refused"] += 1
                continue
            for made in plan.desired:
                if made["kind"] in {kind.kind for kind in OPTIONAL} - MONITORING:
                    theirs.create(made)
                    found[made["kind"]] += 1
    finally:
        theirs.close()
    assert min(found[kind] for kind in ("ScaledObject", "InferencePool", "HTTPRoute")) > 5, found


MONITORING = {"PodMonitor", "PrometheusRule"}
