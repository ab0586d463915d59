"""Copy KV blocks asynchronously between the pool on the device and host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

POLL_INTERVAL_S = 0.0005


class CopyTicket(Protocol):
    """Handle to a batch of copies."""

    def is_done(self) -> bool:
        """Report whether all copies of the batch are complete, without waiting."""


class _DeferredTicket:
    # On a CPU, a batch is copied when its ticket is first polled.
    def __init__(self, run_copy: Callable[[], None]) -> None:
        self._copy: Callable[[], None] | None = run_copy

    def is_done(self) -> bool:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()
        return True


class _EventTicket:
    def __init__(self, event: Any) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())


class BlockCopier:
    """Copier of blocks between the pool on the device and a host buffer of ``num_slots`` blocks.

    ``kv`` [2, layers, blocks * block_size, heads, dim] is the pool. ``scales`` [2, layers, blocks *
    block_size, heads] are the scales of an FP8 pool.
    """

    def __init__(
        self, kv: torch.Tensor, block_size: int, num_slots: int, scales: torch.Tensor | None = None
    ) -> None:
        self._device = [kv] if scales is None else [kv, scales]
        self._block_size = block_size
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(kv.device) if kv.is_cuda else None
        self._host = [_allocate_buffer(tensor, block_size, num_slots) for tensor in self._device]

    @property
    def nbytes(self) -> int:
        """Size of all host buffers in bytes; 0 after :meth:`close`."""
        return sum(buffer.nbytes for buffer in self._host)

    def store(self, blocks_and_slots: Sequence[tuple[int, int]]) -> CopyTicket:
        """Start to copy blocks to the host. Each pair is (device block, host slot)."""
        return self._start_copies(blocks_and_slots, copy_to_host=True)

    def load(self, blocks_and_slots: Sequence[tuple[int, int]]) -> CopyTicket:
        """Start to copy slots to the device. Each pair is (device block, host slot)."""
        return self._start_copies(blocks_and_slots, copy_to_host=False)

    def _start_copies(
        self, blocks_and_slots: Sequence[tuple[int, int]], copy_to_host: bool
    ) -> CopyTicket:
        if self._stream is None:
            return _DeferredTicket(lambda: self._copy(blocks_and_slots, copy_to_host))
        # Wait for the model's pending reads and writes of the pool.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._copy(blocks_and_slots, copy_to_host)
            cuda: Any = torch.cuda
            event = cuda.Event()
            event.record(self._stream)
        return _EventTicket(event)

    @torch.inference_mode()
    def _copy(self, blocks_and_slots: Sequence[tuple[int, int]], copy_to_host: bool) -> None:
        assert self._device, "closed"
        for block, slot in blocks_and_slots:
            start = block * self._block_size
            for pool, buffer in zip(self._device, self._host, strict=True):
                source, target = pool[:, :, start : start + self._block_size], buffer[slot]
                if not copy_to_host:
                    source, target = target, source
                target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """Wait for copies in progress, and release the buffers. Idempotent."""
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
        self._device = []
        self._host = []


def _allocate_buffer(pool: torch.Tensor, block_size: int, num_slots: int) -> torch.Tensor:
    # Filled with zeros, so that all its pages are resident from the start.
    two, layers, _, *rest = pool.shape
    shape = (num_slots, two, layers, block_size, *rest)
    return torch.empty(shape, dtype=pool.dtype, pin_memory=pool.is_cuda).zero_()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` seconds for ``condition``, and return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True
