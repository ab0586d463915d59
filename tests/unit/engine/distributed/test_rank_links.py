"""Rank 0 and the others over their real sockets: commands in order, and every end is noticed.

Tests ``distributed/leader.py`` and ``distributed/link.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from plimsoll_api.admin import ProcessMemory, Role
from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.distributed.link import LeaderConnection, LeaderLostError
from plimsoll_engine.distributed.member import Member
from plimsoll_engine.errors import LoadError, RanksLostError, SettingsError
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.messages.zygote_ipc import WorkerConfig, make_rendezvous_paths

THREE = np.arange(3, dtype=np.int32)
INPUTS = Inputs(
    THREE, THREE, THREE, THREE, np.arange(2, dtype=np.int32), THREE,
    np.arange(10, dtype=np.int32).reshape(2, 5), np.array([0, 2], np.int32), 1, 2, (2,),
)  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Leader, LeaderConnection]]:
    leader = Leader(tmp_path, 1, 2)
    link = LeaderConnection(tmp_path, 1, Shard(1, 2))
    link.join_group()
    leader.join_group()
    yield leader, link
    link.close()
    leader.close()
    assert not any(path.exists() for path in make_rendezvous_paths(tmp_path, 1))


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[object]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def test_commands_come_whole_and_in_order(pair: tuple[Leader, LeaderConnection]) -> None:
    leader, link = pair
    with leader.run_on_all_ranks(rank_ipc.Step(INPUTS)):
        pass
    leader.send(rank_ipc.CaptureGraph())
    step = link.receive()
    assert isinstance(step, rank_ipc.Step)
    assert isinstance(link.receive(), rank_ipc.CaptureGraph)
    for name in Inputs.__slots__:
        assert np.array_equal(getattr(step.inputs, name), getattr(INPUTS, name)), name
    assert step.inputs.tables.shape == (2, 5)


def test_answers_and_reports_are_distinguished(
    pair: tuple[Leader, LeaderConnection], beside: Callable[..., Future[object]]
) -> None:
    leader, link = pair

    def compute_as_follower() -> None:
        for _ in range(4):
            match link.receive():
                case rank_ipc.ReportMemory():
                    memory = ProcessMemory(Role.WORKER, 7, malloc_in_use=11)
                    link.send(rank_ipc.RankReport(memory, [], 5))
                case rank_ipc.MeasureFreeMemory():
                    link.send(rank_ipc.FreeMemory(9))

    following = beside(compute_as_follower)
    (first,) = leader.get_memory_reports()  # waits
    assert (first.memory.malloc_in_use, first.graph_bytes) == (11, 5)
    leader.get_memory_reports()  # requests new reports without waiting for them
    assert [
        free.bytes
        for free in leader.request_replies(rank_ipc.MeasureFreeMemory(), rank_ipc.FreeMemory)
    ] == [9]
    assert len(leader.get_memory_reports()) == 1
    leader.send(rank_ipc.CaptureGraph())
    following.result(10)


def test_a_lost_rank_and_a_local_failure_are_distinguished(
    pair: tuple[Leader, LeaderConnection],
) -> None:
    leader, link = pair
    with (
        pytest.raises(RanksLostError, match="failed on rank 0: ValueError: odd") as here,
        leader.run_on_all_ranks(rank_ipc.CaptureGraph()),
    ):
        raise ValueError("odd")
    assert leader.lost
    assert not here.value.rank_exited

    def breaks() -> None:
        with leader.run_on_all_ranks(rank_ipc.CaptureGraph()):
            link.close()
            raise RuntimeError("connection closed by peer")

    with pytest.raises(RanksLostError, match="rank 1 has exited") as gone:
        breaks()
    assert gone.value.rank_exited
    assert leader.wait_until_shut_down() is None
    with pytest.raises(RanksLostError, match="cannot send a command to rank 1"):
        leader.send(rank_ipc.CaptureGraph())


@pytest.mark.parametrize(("permanent", "kind"), [(True, LoadError), (False, RanksLostError)])
def test_a_ranks_own_word_for_its_failure_is_passed_on(
    pair: tuple[Leader, LeaderConnection], permanent: bool, kind: type[Exception]
) -> None:
    leader, link = pair
    link.send(rank_ipc.RankError("no such tensor", permanent))
    with pytest.raises(kind, match="no such tensor"):
        leader.wait_until_loaded()
    assert leader.lost


def test_no_rank_outlives_rank_0_unnoticed(tmp_path: Path) -> None:
    leader = Leader(tmp_path, 3, 2)
    link = LeaderConnection(tmp_path, 3, Shard(1, 2))
    closing = threading.Timer(0.2, leader.close)
    link.join_group()
    leader.join_group()
    closing.start()
    with pytest.raises(LeaderLostError):
        link.receive()
    link.close()


def test_what_one_rank_alone_can_do_is_refused_by_name(
    pair: tuple[Leader, LeaderConnection],
) -> None:
    leader, _ = pair
    config = WorkerConfig("m", "/r", "s", kv_offload_bytes=1 << 20, tensor_parallel_size=2)
    with pytest.raises(
        SettingsError, match="--kv-offload-bytes is not supported with --tensor-parallel-size"
    ):
        Member(leader).check_settings(config)
