"""``examples/integrations``: a real API server that has the projects' definitions takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.tools.blocks import ROOT
from tests.lab import binaries
from tests.lab.errors import MissingError
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace, new_lab

FILES = sorted((ROOT / "examples" / "integrations").glob("*.yaml"))


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """A control plane of its own: other tests need clusters without these kinds."""
    lab = new_lab(node=False)
    lab.start()
    try:
        define(lab, *binaries.DEFINITIONS)
        with namespace(lab.kube) as found:
            yield found
    finally:
        lab.stop()


def define(lab: Lab, *modules: str) -> None:
    """Load the resource definitions of these releases, and wait until they are served."""
    for module in modules:
        try:
            files = sorted(binaries.module(module).glob(binaries.DEFINITIONS[module]))
        except MissingError as missing:
            pytest.skip(str(missing))
        assert files, f"{module} has no {binaries.DEFINITIONS[module]}"
        flags = [argument for path in files for argument in ("-f", str(path))]
        applied = lab.kube("apply", "--server-side", "-o", "name", *flags).split()
        lab.kube.established(*(name.partition("/")[2] for name in applied))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_api_server_takes_an_example(kube: Kube, path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))

    def applied() -> str:
        return kube("apply", "--dry-run=server", "--validate=strict", "-f", str(path))

    said = str(eventually(applied, "the API server serves the kinds"))
    assert said.count("(server dry run)") == len(documents)
