"""Which allocator a process uses, as its probe finds out.

Tests ``plimsoll_probe/memory.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plimsoll_probe import memory

MIB = 1 << 20


def glibc(monkeypatch: pytest.MonkeyPatch, held: list[int]) -> None:
    """An account of glibc's that says one of ``held`` at each call."""

    def account() -> memory._Mallinfo2:
        return memory._Mallinfo2(uordblks=held.pop(0))

    made: Callable[[], memory._Mallinfo2] = account
    monkeypatch.setattr(memory, "_mallinfo2", made)


def test_threads_that_free_memory_meanwhile_hide_no_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that starts frees a lot: its account was unknown for the rest of its life."""
    glibc(monkeypatch, [500 * MIB, 515 * MIB])
    assert memory._uses_glibc_malloc()


def test_a_thread_that_frees_more_than_the_block_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    glibc(monkeypatch, [500 * MIB, 400 * MIB, 400 * MIB, 416 * MIB])
    assert memory._uses_glibc_malloc()


def test_another_allocator_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    glibc(monkeypatch, [500 * MIB, 501 * MIB] * memory.NUM_TEST_ALLOCATIONS)
    assert not memory._uses_glibc_malloc()
