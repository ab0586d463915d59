"""A supervisor believes what was published while it is within its bounds, and growth while recent.

Tests ``signals/other_pods.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api import learned, peers
from plimsoll_api.learned import LearnedMemory, LearnedWorkload
from plimsoll_api.peers import MAX_BASELINE_AGE_S, MAX_PEERS, MAX_PEERS_BYTES, Peer, PeerGrowth
from plimsoll_api.workloads import WorkloadRef
from plimsoll_sidecar.signals.other_pods import MAX_PEERS_AGE_S, LearnedFile, PeersFile

ONE = Peer("qwen-0", "64d8", host=PeerGrowth(1 << 20, 60, 7))
TWO = Peer("qwen-1", "64d8", "Deployment/qwen", device=PeerGrowth(0, 61, 0))
LARGEST = PeerGrowth(peers.MAX_PEER_GROWTH_BYTES, MAX_BASELINE_AGE_S, peers.MAX_PEER_REQUESTS)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_file_counts_while_it_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / peers.PEERS_FILE, Clock()
    file = PeersFile(path, clock)
    assert file.read_peers() == ()
    path.write_bytes(peers.encode_peers([ONE, TWO]))
    assert file.read_peers() == (ONE, TWO)
    clock.now += MAX_PEERS_AGE_S - 1
    assert file.read_peers() == (ONE, TWO)
    clock.now += 1
    assert file.read_peers() == (), "the operator is away"
    path.write_bytes(peers.encode_peers([TWO]))
    assert file.read_peers() == (TWO,)
    path.unlink()
    assert file.read_peers() == ()


def test_a_file_of_unknown_age_counts_from_its_first_change(tmp_path: Path) -> None:
    path = tmp_path / peers.PEERS_FILE
    path.write_bytes(peers.encode_peers([ONE]))
    file = PeersFile(path)
    assert file.read_peers() == ()
    path.write_bytes(peers.encode_peers([TWO]))
    assert file.read_peers() == (TWO,)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[" * 40_000,
        b'[{"pod":"a","revision":"b","host":{"bytes":1,"age_s":2,"requests":3}}',
        b'[{"pod":"a","revision":""}]',
        b'[{"pod":"a","revision":"b","host":{"bytes":-1,"age_s":2,"requests":3}}]',
        b'[{"pod":"a","revision":"b","host":{"bytes":1e300,"age_s":2,"requests":3}}]',
        b'[{"pod":"a","revision":"b","host":{"bytes":1,"age_s":2}}]',
        b'[{"pod":"\xff","revision":"b"}]',
        b'[{"pod":"' + b"a" * 254 + b'","revision":"b"}]',
        peers.encode_peers([ONE] * (MAX_PEERS + 1)),
        peers.encode_peers([ONE]) + b" " * MAX_PEERS_BYTES,
    ],
)
def test_a_file_that_breaks_a_bound_says_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / peers.PEERS_FILE
    file = PeersFile(path)
    path.write_bytes(data)
    assert file.read_peers() == ()
    path.write_bytes(peers.encode_peers([ONE]))
    assert file.read_peers() == (ONE,)


def test_what_was_learned_is_read_for_the_own_workload(tmp_path: Path) -> None:
    path = tmp_path / learned.LEARNED_FILE
    file = LearnedFile(path)
    assert file.read(None) is None
    service = LearnedWorkload("", "64d8", 1, host=LearnedMemory(60, (1, 2, 3), 4, 5))
    other = LearnedWorkload("Deployment/qwen", "1", 1, device=LearnedMemory(budget=7))
    path.write_bytes(learned.encode_learned([service, other]))
    assert file.read(None) == service
    assert file.read(WorkloadRef("Deployment", "qwen")) == other
    assert file.read(WorkloadRef("Deployment", "llama")) is None


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[" * 200_000,
        b'[{"workload":"","revision":"","at":1}]',
        b'[{"workload":"","revision":"a","at":-1}]',
        b'[{"workload":"","revision":"a","at":1,"host":{"budget":0}}]',
        b'[{"workload":"","revision":"a","at":1,"host":{"gains":[1,2]}}]',
        b'[{"workload":"","revision":"a","at":1,"host":{"seen_s":1e99}}]',
    ],
)
def test_lessons_that_break_a_bound_say_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / learned.LEARNED_FILE
    path.write_bytes(data)
    assert LearnedFile(path).read(None) is None


@given(st.binary(max_size=300))
def test_no_bytes_end_a_supervisor(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("peers") / peers.PEERS_FILE
    file = PeersFile(path)
    path.write_bytes(data)
    file.read_peers()
    LearnedFile(path).read(None)


def test_the_largest_file_has_room() -> None:
    worst = [Peer("p" * 253, "r" * 63, "w" * 317, LARGEST, LARGEST)] * MAX_PEERS
    data = peers.encode_peers(worst)
    assert len(data) <= MAX_PEERS_BYTES
    assert peers.decode_peers(data) == tuple(worst)
