"""Each leak in a process of its own: it grows by what it was told to take, where it says."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from leaklab import (
    bookkeeping_leaks,
    bounded_caches,
    bounded_growth,
    device_growth,
    device_reserves,
    ended_growth,
    engine_leaks,
    library_leaks,
    mechanisms,
    runtime_leaks,
    service_leaks,
)

MIB = 1 << 20
PIECES = 64
PROGRAM = """
import ctypes, gc, sys
from pathlib import Path
name, field, pieces = sys.argv[1], sys.argv[2], int(sys.argv[3])
if name in ("kept_logits", "shared_tensors"):
    import torch
from leaklab import (
    bookkeeping_leaks, engine_leaks, library_leaks, runtime_leaks, service_leaks,
)
LEAKS = service_leaks.LEAKS | engine_leaks.LEAKS | runtime_leaks.LEAKS | library_leaks.LEAKS
LEAKS |= bookkeeping_leaks.LEAKS
def resident():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])
take = LEAKS[name]()
take(1 << 20)
before = resident()
for _ in range(pieces):
    take(1 << 20)
print(resident() - before)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print(resident() - before)
"""
"""Prints by how much the process has grown, and by how much after a collection and a trim."""
HOLES = f"""
import ctypes, threading
from leaklab import library_leaks
class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
def work():
    take = library_leaks.aligned_buffers()
    take(1 << 20)
    before = mallinfo2()
    for _ in range({PIECES}):
        take(1 << 20)
    after = mallinfo2()
    print(after.uordblks - before.uordblks, after.fordblks - before.fordblks)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
"""In a thread, as the injector has one."""
SHARED = (
    "memory_files", "sysv_segments", "shared_arenas", "shared_tensors", "growing_channel",
    "raw_arrays", "attached_blocks", "sealed_messages",
)  # fmt: skip
NOT_HERE = set() if find_spec("zmq") else {"unread_socket"}
"""What needs a package of the engine's that this environment may lack."""
WITHIN = 0.15
"""Of the bytes that are counted: a table has its room, an arena its headers."""


@pytest.mark.parametrize(
    "name",
    [
        *service_leaks.LEAKS,
        *sorted(engine_leaks.LEAKS.keys() - {"helper_heap"}),
        *runtime_leaks.LEAKS,
        *(name for name in library_leaks.LEAKS if name not in NOT_HERE),
    ],
)
def test_a_process_grows_by_what_it_was_told_to_take(name: str) -> None:
    grown, _ = growth(name)
    assert grown == pytest.approx(PIECES * MIB, rel=WITHIN)


@pytest.mark.parametrize("name", bookkeeping_leaks.LEAKS)
def test_no_collection_and_no_trim_returns_what_leaked(name: str) -> None:
    for size in growth(name):
        assert size == pytest.approx(PIECES * MIB, rel=WITHIN)


def growth(name: str) -> tuple[int, int]:
    """Bytes by which a process grows that leaks, before and after a collection and a trim."""
    field = "RssShmem" if name in SHARED else "RssAnon"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, field, str(PIECES)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    grown, kept = (int(number) for number in done.stdout.split())
    return grown, kept


def test_what_lies_below_an_aligned_buffer_is_free_and_no_work_takes_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=120
    )
    in_use, free = (int(number) for number in done.stdout.split())
    assert free == pytest.approx(PIECES * MIB * 15 / 16, rel=WITHIN)
    assert in_use == pytest.approx(PIECES * MIB / 16, rel=WITHIN)


def test_no_two_mechanisms_have_the_same_name() -> None:
    groups = (
        service_leaks.LEAKS, engine_leaks.LEAKS, runtime_leaks.LEAKS, library_leaks.LEAKS,
        bookkeeping_leaks.LEAKS, device_growth.LEAKS, device_growth.HEALTHY, device_growth.BOUNDED,
        device_reserves.LEAKS, device_reserves.HEALTHY, bounded_growth.HEALTHY,
        ended_growth.HEALTHY, bounded_caches.BOUNDED, mechanisms.LEAKS | mechanisms.HEALTHY,
    )  # fmt: skip
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))
