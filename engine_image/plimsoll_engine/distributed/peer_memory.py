"""Device buffers that all ranks map, for collectives on CUDA.

CUDA IPC shares them (CUDA Driver API, "Unified Addressing", "Memory Management").
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

from plimsoll_engine.device.buffer import IPC_HANDLE_BYTES, CudaError, DeviceBuffer

log = logging.getLogger(__name__)

# Returns the argument of every rank, in rank order.
Gather = Callable[[bytes], list[bytes]]


class PeerMemory:
    """Buffer of this rank, initially zeros, and mappings of the other ranks' buffers.

    All ranks must create and close their instances together.
    """

    def __init__(
        self, own_buffer: DeviceBuffer, other_buffers: dict[int, DeviceBuffer], rank: int
    ) -> None:
        self._own_buffer = own_buffer
        self._other_buffers = other_buffers
        self._rank = rank

    @classmethod
    def connect(cls, rank: int, num_ranks: int, nbytes: int, gather: Gather) -> PeerMemory | None:
        """Allocate a buffer of ``nbytes`` bytes on each rank, and map every buffer on every rank.

        If this fails on any rank, return None on all ranks.
        """
        own_buffer, handle, other_buffers = None, bytes(IPC_HANDLE_BYTES), {}
        try:
            _check_peer_access(rank, num_ranks)
            own_buffer = DeviceBuffer.allocate(nbytes)
            own_buffer.as_tensor().zero_()
            torch.cuda.synchronize()
            handle = own_buffer.export_handle()
        except RuntimeError as error:
            _log_fallback(error)
        handles = gather(handle)
        connected = all(any(data) for data in handles)
        if connected:
            try:
                for peer in range(num_ranks):
                    if peer != rank:
                        other_buffers[peer] = DeviceBuffer.map(handles[peer], nbytes)
            except CudaError as error:
                _log_fallback(error)
                connected = False
        # This exchange also ensures that no rank writes before all buffers are zeroed.
        if all(data == b"\1" for data in gather(bytes([connected]))):
            assert own_buffer is not None
            return cls(own_buffer, other_buffers, rank)
        for buffer in other_buffers.values():
            buffer.close()
        gather(b"\0")
        if own_buffer is not None:
            own_buffer.close()
        return None

    @property
    def addresses(self) -> list[int]:
        """Addresses of all ranks' buffers in this process, in rank order."""
        buffers = self._other_buffers | {self._rank: self._own_buffer}
        return [buffers[rank].pointer for rank in range(len(buffers))]

    @property
    def nbytes(self) -> int:
        """Size of this rank's buffer in bytes; 0 after it was freed."""
        return self._own_buffer.nbytes if self._own_buffer.pointer else 0

    def as_tensor(self) -> torch.Tensor:
        """Return this rank's buffer as uint8 [bytes]."""
        return self._own_buffer.as_tensor()

    def close(self, gather: Gather | None) -> None:
        """Unmap and free the buffers. Idempotent.

        Call this once no kernel of this rank uses them. ``gather`` waits for the other ranks; pass
        None if a rank is lost.
        """
        if not self._own_buffer.pointer:
            return
        if gather is not None:
            gather(b"\0")
        # A lost device rejects all calls. Its memory is freed when the process exits.
        with contextlib.suppress(CudaError):
            for buffer in self._other_buffers.values():
                buffer.close()
            if gather is not None:
                gather(b"\0")
            self._own_buffer.close()


def _check_peer_access(rank: int, num_ranks: int) -> None:
    for peer in range(num_ranks):
        if peer != rank and not torch.cuda.can_device_access_peer(rank, peer):
            raise CudaError(f"device {rank} cannot access the memory of device {peer}")


def _log_fallback(error: RuntimeError) -> None:
    log.warning(
        "the ranks use NCCL for collectives, because they cannot share device memory: %s", error
    )
