"""One lab for a test session: a real control plane, and a node on it when a test asks for one."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.durations import Durations
from tests.lab.errors import MissingError
from tests.leftovers import watch_over_this_run
from tests.missing import lacks

if TYPE_CHECKING:
    from tests.lab.definitions import Definitions
    from tests.lab.lab import ExistingCluster, Lab

E2E = "PLIMSOLL_E2E_KUBECONFIG"

# Hypothesis fails an example that takes 200 ms. On a busy machine that says nothing of the code;
# every test has a time limit of its own, and benchmarks hold the speed.
settings.register_profile("plimsoll", deadline=None)
settings.load_profile("plimsoll")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write what each test file costs to this file (see tests/durations.py)"
    parser.addoption("--durations-file", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        watch_over_this_run()
    target = None if hasattr(config, "workerinput") else config.option.durations_file
    if target is not None or "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(Durations(target), "durations-file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = {r.nodeid for kind in ("failed", "error") for r in terminalreporter.getreports(kind)}
    flaky = [r for r in terminalreporter.getreports("rerun") if r.nodeid not in failed]
    if flaky:
        terminalreporter.section("flaky tests: they passed only when run again", yellow=True)
    for report in flaky:
        terminalreporter.line(report.nodeid)
        terminalreporter.line(report.longreprtext[-4000:])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected lives as long as the process: half a million objects, which
    each ``gc.collect()`` of a test would walk through for half a second, and those of the
    collection's own garbage collections too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the lab's binaries before any test's time limit runs, if a test needs them."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if wanted & {"cluster", "node", "node_tier"} and not session.config.option.collectonly:
        from tests.lab.binaries import find
        from tests.lab.node import missing as missing_for_a_node

        with contextlib.suppress(MissingError):  # the fixture says so
            find(node=missing_for_a_node() is None)


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """A client of httpx (or httpx2, which openai uses) reads the certificates of all authorities
    when it is made: 25 ms of CPU for a request to loopback, and tests make thousands of clients."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for library in ("httpx", "httpx2"):
            if transports := sys.modules.get(f"{library}._transports.default"):
                made = functools.cache(transports.create_ssl_context)
                monkeypatch.setattr(transports, "create_ssl_context", made)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, made once for all parallel workers. Copy it before changing it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny-checkpoint"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = folder.with_suffix(".part")
            command = [sys.executable, "-m", "plimsoll_faults.models.tiny", str(making)]
            subprocess.run(command, check=True, timeout=600)
            making.rename(folder)
    return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    """A control plane with our CRDs; ``.kubeconfig`` is the administrator's."""
    # Imported here: tests on a machine with a GPU have no use for the lab and what it needs.
    from tests.lab.lab import new_lab
    from tests.lab.node import missing as missing_for_a_node

    try:
        lab = new_lab(node=missing_for_a_node() is None)
    except MissingError as error:
        lacks(str(error))
    lab.start()
    _kubectl_on_path(lab)
    try:
        yield lab
    finally:
        lab.stop()


@pytest.fixture(scope="session")
def definitions() -> Iterator[Definitions]:
    """Our resource definitions, as an API server applies them, without the server."""
    from tests.lab import binaries
    from tests.lab.definitions import Definitions
    from tests.lab.lab import CRDS

    try:
        made = Definitions(binaries.kubelab(build=False), sorted(CRDS.glob("*.yaml")))
    except MissingError as error:
        lacks(str(error))
    yield made
    made.close()


@pytest.fixture(
    scope="session",
    params=[pytest.param(3, marks=pytest.mark.long), 4],
    ids=["helm3", "helm4"],
)
def helm(request: pytest.FixtureRequest) -> str:
    """Path of Helm, of both majors that are in use."""
    from tests.lab import binaries

    try:
        return binaries.helm(request.param)
    except MissingError as error:
        lacks(str(error))
        raise


@pytest.fixture(scope="session")
def node_tier() -> None:
    """For tests that start nodes of their own: what this machine lacks is said."""
    from tests.lab.node import missing as missing_for_a_node

    if (why := missing_for_a_node()) is not None:
        lacks(why)


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> Iterator[Lab | ExistingCluster]:
    """The same control plane with a real kubelet, or the cluster that is named for it."""
    from tests.lab.lab import ExistingCluster

    if named := os.environ.get(E2E):
        try:
            yield ExistingCluster(Path(named))
        except MissingError as error:
            lacks(str(error))
        return
    request.getfixturevalue("node_tier")
    from tests.conformance.peers import PEERS

    lab: Lab = request.getfixturevalue("cluster")
    lab.start_node(shown=[peer.home for peer in PEERS.values() if peer.ready])
    yield lab


def _kubectl_on_path(lab: Lab) -> None:
    if shutil.which("kubectl") is None:
        os.environ["PATH"] += f":{lab.tools()}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How parallel workers share the tests: a file stays in one piece, and so do the tests of each
    of three labs, which stand side by side.

    (The groups of ``--dist loadgroup`` are lost on pytest 9.2: xdist 3.8 writes them into a field
    that is no longer read, and says nothing.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((lab for lab in LABS if file.startswith(lab)), file)

    return ByFile(config, log)


LABS = ("tests/cluster/operator/", "tests/cluster/", "tests/node/")
"""Folders whose tests share a lab: each before the one that holds it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait most come first, the lab's long chain before all others; short ones fill the
    end. The fuzzers' corpus is one long file, and so are those for Triton's interpreter: at the
    end, each would leave all workers but one idle."""
    order = {"cluster": 0, "node": 0, "integration": 1, "fuzz": 1}
    items.sort(key=lambda item: 1 if item.name == "interpreted" else order.get(_tier(item), 2))
    for item in items:
        if _tier(item) in REAL_TIERS:
            item.add_marker(pytest.mark.flaky(reruns=1))


REAL_TIERS = frozenset({"integration", "cluster", "node"})
"""Their tests share the machine with other tests' processes, ports and load. One that fails runs
once more; what passes only then is named at the end of the run. It is a defect to mend, and no
reason to stop a change that has nothing to do with it. ``--force-reruns=0`` gives no second run."""


def _tier(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]
