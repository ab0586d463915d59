"""One buffer on each rank's device that all ranks map: what their sums go through on CUDA.

Plain device memory and CUDA IPC, as for the weight server's buffers (CUDA Driver API, "Unified
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
"""Gives what each rank has given, in their order: as many bytes of each."""


class PeerMemory:
    """A buffer of ``nbytes`` bytes, all zeros at first, and the mappings of the other ranks'.

    Every rank makes it, and closes it, at the same time. ``addresses`` are those of all buffers in
    this process, in the order of the ranks.
    """

    def __init__(self, own: DeviceBuffer, others: dict[int, DeviceBuffer], rank: int) -> None:
        self._own = own
        self._others = others
        self._rank = rank

    @classmethod
    def connect(cls, rank: int, size: int, nbytes: int, gather: Gather) -> PeerMemory | None:
        """Map all ranks' buffers; None on every rank where one of them cannot, which it logs."""
        own, handle, others = None, bytes(HANDLE_BYTES), {}
        try:
            _must_reach(rank, size)
            own = DeviceBuffer.allocate(nbytes)
            own.tensor().zero_()
            torch.cuda.synchronize()
            handle = own.export()
        except RuntimeError as error:
            _say(error)
        handles = gather(handle)
        connected = all(any(one) for one in handles)
        if connected:
            try:
                for other in range(size):
                    if other != rank:
                        others[other] = DeviceBuffer.map(handles[other], nbytes)
            except CudaError as error:
                _say(error)
                connected = False
        # Also: no rank writes before the zeros are there.
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
        """Where each rank's buffer is in this process."""
        found = self._others | {self._rank: self._own}
        return [found[rank].pointer for rank in range(len(found))]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffer; zero once they are given back."""
        return self._own.nbytes if self._own.pointer else 0

    def tensor(self) -> torch.Tensor:
        """Return the buffer of this rank as uint8, [bytes]."""
        return self._own.tensor()

    def close(self, gather: Gather | None) -> None:
        """Unmap and free, once no kernel of this rank uses the buffers. Again does nothing more.

        ``gather`` waits for the other ranks, so that none frees what another one may still use;
        without it a rank is lost, and nobody waits.
        """
        if not self._own.pointer:
            return
        if gather is not None:
            gather(b"\0")
        # A device that is lost takes no calls; the memory then ends with the process.
        with contextlib.suppress(CudaError):
            for buffer in self._others.values():
                buffer.close()
            if gather is not None:
                gather(b"\0")
            self._own.close()


def _must_reach(rank: int, size: int) -> None:
    for other in range(size):
        if other != rank and not torch.cuda.can_device_access_peer(rank, other):
            raise CudaError(f"device {rank} cannot access the memory of device {other}")


def _say(error: RuntimeError) -> None:
    log.warning("the ranks share no device memory, NCCL computes their sums: %s", error)
