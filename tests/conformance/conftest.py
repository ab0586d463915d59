"""One engine and its supervisor for all cases, and the table of what ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.conformance import table
from tests.conformance.peers import PEERS, Peer
from tests.conformance.rig import Rig

Record = Callable[..., None]
Started = Callable[[Peer], AbstractContextManager[Rig]]


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Starts a peer and its supervisor; both end with the block."""

    @contextmanager
    def start(peer: Peer) -> Iterator[Rig]:
        if not peer.ready:
            pytest.skip(f"{peer.name} is not installed: make engines")
        one = Rig(peer, Path(tmp_path_factory.mktemp(peer.name)))
        try:
            one.start()
            yield one
        finally:
            one.end()

    return start


@pytest.fixture(scope="session", params=list(PEERS))
def rig(request: pytest.FixtureRequest, started: Started) -> Iterator[Rig]:
    with started(PEERS[request.param]) as one:
        yield one


@pytest.fixture
def record(request: pytest.FixtureRequest, rig: Rig) -> Record:
    """Puts a case that passed into the table, in place of what was known of it: with what it took
    in seconds, where that is of interest."""

    def note(case: str, seconds: float | None = None, told: str = "") -> None:
        taken = round(seconds, 1) if seconds is not None else None
        table.write(table.Ran(rig.peer.type.value, rig.peer.version, case, taken, told))

    return note
