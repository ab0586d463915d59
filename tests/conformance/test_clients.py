"""Published client libraries ask the engine with SmolLM2: a table of docs/engine-api.md.

Tests ``plimsoll_engine/api``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from bench.result import publish
from tests.conformance import published
from tests.conformance.client_libraries import CASES, LIBRARIES, Library
from tests.integration.engine.conftest import MODEL, Engine

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not published.ready(), reason="not made: make engines"),
]
CASE_S = 300
IDLE_S = 15.0
"""A cancelled request has work for minutes."""
RUNS = [(library, case) for library in LIBRARIES for case in CASES if case not in library.lacks]
PASSED, FAILED = "passed", "failed"
Note = Callable[..., None]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # Room for its whole context: what is cancelled would go on for thousands of tokens.
    folder = tmp_path_factory.mktemp("clients")
    found = Engine(published.SMOLLM2, folder, "--num-blocks", "520").wait_ready()
    yield found
    found.end()


@pytest.fixture(scope="module")
def note() -> Iterator[Note]:
    """Record the outcome of a case and what the library got. A whole run becomes the result."""
    rows: dict[tuple[str, str], dict[str, str]] = {}

    def add(library: Library, case: str, outcome: str, got: str = "") -> None:
        rows[library.name, case] = {
            "library": library.name, "version": library.version, "case": case,
            "outcome": outcome, "got": got,
        }  # fmt: skip

    yield add
    if len(rows) == len(RUNS):
        samples = list(rows.values())
        passed = sum(row["outcome"] == PASSED for row in samples)
        publish("clients", {"passed_count": passed, "cases_count": len(samples)}, samples)


@pytest.mark.parametrize(
    ("library", "case"), RUNS, ids=[f"{library.name}-{case}" for library, case in RUNS]
)
def test_a_library_gets_what_it_asks(
    engine: Engine, library: Library, case: str, note: Note
) -> None:
    if not library.ready:
        pytest.skip("not installed: make engines")
    note(library, case, FAILED)
    ran = subprocess.run(
        library.command(engine.url, MODEL, case),
        cwd=library.home, capture_output=True, text=True, timeout=CASE_S,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-4000:]}\n{engine.log_tail()}"
    engine.until(lambda: engine.status()["load"]["inflight"] == 0, "idle engine", IDLE_S)
    engine.clean()
    note(library, case, PASSED, ran.stdout.strip())
