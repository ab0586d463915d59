"""What the probe declares of vLLM's cache of multimodal inputs in shared memory.

The checkpoint of the other tests takes no images, so vLLM's own classes run here without an engine.

Tests ``plimsoll_probe/engines.py``.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import plimsoll_probe
from plimsoll_api.engines import EngineType
from tests.conformance.peers import PEERS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

RING_BYTES, ITEM_BYTES = 16 << 20, 100_000
VLLM = [name for name, peer in PEERS.items() if peer.type is EngineType.VLLM]
PROGRAM = f"""
import json, threading
from multiprocessing import Lock
from types import SimpleNamespace
from vllm.multimodal.cache import ShmObjectStoreReceiverCache, ShmObjectStoreSenderCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker.worker_base import WorkerWrapperBase
from plimsoll_probe.engines import EngineReader
from plimsoll_probe.memory import read_status_bytes

limits = SimpleNamespace(
    mm_processor_cache_gb={RING_BYTES} / (1 << 30), mm_shm_cache_max_object_size_mb=1
)
config = SimpleNamespace(
    parallel_config=SimpleNamespace(world_size=2),
    model_config=SimpleNamespace(get_multimodal_config=lambda: limits),
)
shared_before = read_status_bytes("RssShmem")
sender, lock = ShmObjectStoreSenderCache(config), Lock()
ring = sender._shm_cache.ring_buffer

def start_worker(rank):
    worker = WorkerProc.__new__(WorkerProc)
    worker.worker = WorkerWrapperBase(rpc_rank=rank)
    worker.worker.worker = SimpleNamespace()
    worker.worker.mm_receiver_cache = ShmObjectStoreReceiverCache(config, lock)
    return worker

workers = [start_worker(rank) for rank in range(2)]

class Ended(Exception):
    pass

def read_ledger(worker):
    found = []
    def dequeue(indefinite):
        asking = threading.Thread(target=lambda: found.append(EngineReader().read()))
        asking.start()
        asking.join()
        raise Ended
    worker.rpc_broadcast_mq = SimpleNamespace(dequeue=dequeue)
    try:
        worker.worker_busy_loop()
    except Ended:
        return found[0]["ledger"]

def send(numbers):
    item = MultiModalKwargsItem.dummy({ITEM_BYTES})
    return {{str(n): sender.get_and_update_item((item, []), str(n))[0] for n in numbers}}

def receive(items):
    for name, item in items.items():
        for worker in workers:
            got = worker.worker.mm_receiver_cache.get_and_update_item(item, name)
            assert got["dummy"].data.nbytes == {ITEM_BYTES}

told = []
def tell():
    told.append({{
        "ledgers": [read_ledger(worker) for worker in workers],
        "written": getattr(ring, "DATA_OFFSET", 0) + ring.data_buffer_end,
        "shared": read_status_bytes("RssShmem") - shared_before,
    }})

tell()
items = send(range(50))
tell()
receive(items)
for number in range(50, 400):
    receive(send([number]))
tell()
for number in range(400, 800):
    receive(send([number]))
tell()
sender.close()
print(json.dumps(told))
"""


def count_page_bytes(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@pytest.fixture(scope="module", params=VLLM)
def told(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the workers declare of an empty ring, after 50 items, and after it was full twice."""
    peer = PEERS[request.param]
    if not peer.ready:
        pytest.skip(f"{peer.name} is not installed: make engines")
    probe = Path(plimsoll_probe.__file__).parent.parent
    run = subprocess.run(
        [str(peer.python), "-c", PROGRAM],
        env=os.environ | peer.environment | {"PYTHONPATH": str(probe)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=500,
    )
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_the_first_worker_declares_the_pages_that_were_written(told: list[dict[str, Any]]) -> None:
    empty, partly, *_ = [one["ledgers"][0] for one in told]
    for (line,), seen in ((empty, told[0]), (partly, told[1])):
        assert (line["owner"], line["kind"]) == ("multimodal_cache", "host")
        assert line["bytes"] == count_page_bytes(seen["written"])
    # So far, only the sender has touched the pages.
    assert partly[0]["bytes"] == told[1]["shared"] >= 50 * ITEM_BYTES


def test_a_full_ring_stays_within_its_bound(told: list[dict[str, Any]]) -> None:
    (full,), (later,) = [one["ledgers"][0] for one in told[2:]]
    assert full["bound"] == later["bound"]
    assert RING_BYTES <= full["bound"] <= RING_BYTES + mmap.PAGESIZE
    assert RING_BYTES - 2 * ITEM_BYTES <= full["bytes"] <= later["bytes"] <= full["bound"]


def test_the_ring_is_declared_once(told: list[dict[str, Any]]) -> None:
    assert [one["ledgers"][1] for one in told] == [[]] * 4
