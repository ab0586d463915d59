"""Figures from the engine's own objects, found in the stack of the loop that runs them.

Tests ``plimsoll_probe/engines.py``.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll_probe import engines


class EngineCoreProc:
    """The attributes of vLLM's that are read, with its names."""

    def __init__(self) -> None:
        pool = SimpleNamespace(
            get_usage=lambda: 0.25,
            num_gpu_blocks=100,
            cached_block_hash_to_block=SimpleNamespace(_cache=dict.fromkeys(range(40))),
        )
        self.scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool))
        self.model_executor = SimpleNamespace()
        self.mm_receiver_cache: SimpleNamespace | None = SimpleNamespace(
            _cache=SimpleNamespace(currsize=1000.0, maxsize=4000.0)
        )
        self.structured_output_manager = SimpleNamespace(
            backend=SimpleNamespace(
                compiler=SimpleNamespace(cache_limit_bytes=500, get_cache_size_bytes=lambda: 20)
            )
        )

    def run_busy_loop(self, inside: Callable[[], None]) -> None:
        batch = Held()
        inside()
        del batch
        self.alive = Held.alive


class DPEngineCoreProc(EngineCoreProc):
    pass


class WorkerProc:
    def __init__(self, worker: SimpleNamespace) -> None:
        self.worker = worker

    def worker_busy_loop(self, inside: Callable[[], None]) -> None:
        inside()


class Scheduler:
    def __init__(self) -> None:
        self.forward_ct = 7
        self.token_to_kv_pool_allocator = SimpleNamespace(size=100, available_size=lambda: 50)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 20)

    def event_loop_normal(self, inside: Callable[[], None]) -> None:
        inside()


class Held:
    alive = 0

    def __init__(self) -> None:
        Held.alive += 1

    def __del__(self) -> None:
        Held.alive -= 1


def within(loop: Callable[[Callable[[], None]], None]) -> dict[str, Any]:
    """What is read of an engine while ``loop`` runs in the main thread."""
    read: list[dict[str, Any]] = []

    def ask() -> None:
        asking = threading.Thread(target=lambda: read.append(engines.EngineReader().read()))
        asking.start()
        asking.join()

    loop(ask)
    return read[0]


@pytest.mark.parametrize("kind", [EngineCoreProc, DPEngineCoreProc])
def test_vllms_core(kind: type[EngineCoreProc]) -> None:
    found = within(kind().run_busy_loop)
    assert found["role"] == "EngineCore"
    assert found["kv_usage_ratio"] == 0.25
    assert found["prefix_cache_ratio"] == 0.4
    assert found["ledger"] == [
        {"owner": "multimodal_cache", "kind": "host", "bytes": 1000, "bound": 4000},
        {"owner": "grammar_cache", "kind": "host", "bytes": 20, "bound": 500},
    ]


@contextmanager
def ring(pages: int) -> Iterator[SharedMemory]:
    """Shared memory of ``pages`` pages and what vLLM 0.32 adds for a secret, all unwritten."""
    memory = SharedMemory(create=True, size=pages * mmap.PAGESIZE + 32)
    try:
        yield memory
    finally:
        memory.close()
        memory.unlink()


def reader_of(memory: SharedMemory, rank: int) -> SimpleNamespace:
    storage = SimpleNamespace(ring_buffer=SimpleNamespace(shared_memory=memory))
    return SimpleNamespace(rpc_rank=rank, mm_receiver_cache=SimpleNamespace(_shm_cache=storage))


def write(memory: SharedMemory, pages: int) -> None:
    assert memory.buf is not None
    for page in range(pages):
        memory.buf[page * mmap.PAGESIZE] = 1


def ring_entry(pages: int, bound: int) -> dict[str, Any]:
    size, limit = pages * mmap.PAGESIZE, bound * mmap.PAGESIZE
    return {"owner": "multimodal_cache", "kind": "host", "bytes": size, "bound": limit}


def test_the_first_worker_declares_what_was_written_of_vllms_ring() -> None:
    with ring(8) as memory:
        first, second = (WorkerProc(reader_of(memory, rank)) for rank in (0, 1))
        assert within(first.worker_busy_loop)["ledger"] == [ring_entry(0, 9)]
        write(memory, 3)
        assert within(first.worker_busy_loop)["ledger"] == [ring_entry(3, 9)]
        assert within(second.worker_busy_loop)["ledger"] == []
        write(memory, 9)
        assert within(first.worker_busy_loop)["ledger"] == [ring_entry(9, 9)]


def test_a_core_that_runs_the_model_declares_vllms_ring() -> None:
    core = EngineCoreProc()
    core.mm_receiver_cache = None
    del core.structured_output_manager
    with ring(8) as memory:
        core.model_executor = SimpleNamespace(driver_worker=reader_of(memory, 0))
        write(memory, 2)
        assert within(core.run_busy_loop)["ledger"] == [ring_entry(2, 9)]


def test_a_ring_whose_file_is_gone_is_unknown() -> None:
    with ring(1) as memory:
        worker = WorkerProc(reader_of(memory, 0))
    assert within(worker.worker_busy_loop)["ledger"] == []


def test_sglangs_scheduler() -> None:
    found = within(Scheduler().event_loop_normal)
    assert (found["role"], found["steps_total"]) == ("Scheduler", 7)
    assert (found["kv_usage_ratio"], found["prefix_cache_ratio"]) == (0.3, 0.2)


def test_what_another_version_has_not_is_unknown() -> None:
    core = EngineCoreProc()
    del core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    del core.structured_output_manager
    found = within(core.run_busy_loop)
    assert "prefix_cache_ratio" not in found
    assert [line["owner"] for line in found["ledger"]] == ["multimodal_cache"]


def test_a_process_without_a_known_loop_says_nothing() -> None:
    assert engines.EngineReader().read() == {}


def test_looking_keeps_nothing_of_the_loop_alive() -> None:
    """A frame keeps the copy that somebody took of its variables, and the loop never returns."""
    core = EngineCoreProc()
    assert within(core.run_busy_loop)["role"] == "EngineCore"
    assert core.alive == 0
