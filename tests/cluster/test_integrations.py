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
from tests.lab.lab import namespace, new_lab

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
