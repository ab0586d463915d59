"""Device buffers that all ranks map, for all-reduces on CUDA.

They are shared through CUDA IPC, like the weight server's buffers (CUDA Driver API, "Unified
Addressing", "Memory Management"). A device writes to another one's memory over NVLink or PCIe.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

from plimsoll_engine.device.buffer import HANDLE_BYTES, CudaError, DeviceBuffer

log = logging.getLogger(__name__)

Gather = Callable[[bytes], list[bytes]]
"""Function that returns the given bytes of all ranks, in rank order."""


class PeerMemory:
    """Buffer of this rank, filled with zeros, and mappings of the other ranks' buffers.

    All ranks must create and close it together.
    """

    def __init__(self, own: DeviceBuffer, others: dict[int, DeviceBuffer], rank: int) -> None:
        self._own = own
        self._others = others
        self._rank = rank

    @classmethod
    def connect(cls, rank: int, size: int, nbytes: int, gather: Gather) -> PeerMemory | None:
        """Map a buffer of ``nbytes`` bytes on each rank.

        Return None on every rank if one rank cannot map them; that rank logs the reason.
        """
        own, handle, others = None, bytes(HANDLE_BYTES), {}
        try:
            _check_peer_access(rank, size)
            own = DeviceBuffer.allocate(nbytes)
            own.as_tensor().zero_()
            torch.cuda.synchronize()
            handle = own.export()
        except RuntimeError as error:
            _log_fallback(error)
        handles = gather(handle)
        connected = all(any(one) for one in handles)
        if connected:
            try:
                for other in range(size):
                    if other != rank:
                        others[other] = DeviceBuffer.map(handles[other], nbytes)
            except CudaError as error:
                _log_fallback(error)
                connected = False
        # This exchange also ensures that no rank writes before all buffers are zeroed.
        if all(one == b"\1" for one in gather(bytes([connected]))):
            assert own is not None
            return cls(own, others, rank)
        for buffer in others.values():
            buffer.close()
        gather(b"\0")
        if own is not None:
            own.close()
        return None

    @property
    def addresses(self) -> list[int]:
        """Addresses of all buffers in this process, in rank order."""
        found = self._others | {self._rank: self._own}
        return [found[rank].pointer for rank in range(len(found))]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffer; 0 once it is freed."""
        return self._own.nbytes if self._own.pointer else 0

    def as_tensor(self) -> torch.Tensor:
        """Return this rank's buffer as uint8 [bytes]."""
        return self._own.as_tensor()

    def close(self, gather: Gather | None) -> None:
        """Unmap and free the buffers. No kernel of this rank may still use them. Idempotent.

        ``gather`` waits until no rank uses them any more. It is None if a rank is lost: nothing is
        waited for.
        """
        if not self._own.pointer:
            return
        if gather is not None:
            gather(b"\0")
        # A lost device accepts no calls; its memory is freed when the process exits.
        with contextlib.suppress(CudaError):
            for buffer in self._others.values():
                buffer.close()
            if gather is not None:
                gather(b"\0")
            self._own.close()


def _check_peer_access(rank: int, size: int) -> None:
    for other in range(size):
        if other != rank and not torch.cuda.can_device_access_peer(rank, other):
            raise CudaError(f"device {rank} cannot access the memory of device {other}")


def _log_fallback(error: RuntimeError) -> None:
    log.warning(
        "the ranks cannot share device memory, so NCCL performs their all-reduces: %s", error
    )
