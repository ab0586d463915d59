"""One flat buffer, of weights or of the KV pool, that two processes can see.

On CUDA it is plain device memory, shared by its IPC handle; on a CPU an anonymous file in shared
memory (memfd), shared by its descriptor. A worker maps weights read-only there.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Protocol

import torch

from plimsoll_engine.device.buffer import DeviceBuffer


class Buffer(Protocol):
    """Close it only when no tensor over it is used any more."""

    nbytes: int

    def tensor(self) -> torch.Tensor:
        """All of it as uint8, [nbytes]."""
        ...

    def close(self) -> bool:
        """Give the memory back. Tensors of it must not be used any more.

        False where something still keeps it mapped here.
        """
        ...


class HostBuffer:
    """Shared host memory. ``fd`` is open for the buffer's life in the process that made it."""

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        self.fd = fd
        self.nbytes = nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Populated, so that the mapping has its full resident size at once: pages that come in
        # while it serves would look like growth.
        self._map: mmap.mmap | None = mmap.mmap(
            fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection
        )

    @classmethod
    def allocate(cls, nbytes: int, name: str) -> HostBuffer:
        """Allocate the buffer; raise OSError where the memory is not there."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes, writable=True)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def map(cls, fd: int, writable: bool = False) -> HostBuffer:
        """Return the buffer behind ``fd``, which this takes over.

        Unless it is ``writable``, a write to it is a fault.
        """
        return cls(fd, os.fstat(fd).st_size, writable)

    def tensor(self) -> torch.Tensor:
        """uint8 [bytes] over the mapping, without a copy."""
        assert self._map is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # that is the point
            return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> bool:
        """Unmap it: a tensor that still lives would fault. Again does nothing more."""
        if self._map is None:
            return True
        held, self._map = self._map, None
        os.close(self.fd)
        try:
            held.close()
        except BufferError:  # a memoryview exports it: it goes with the last one
            return False
        return True


def allocate(device: torch.device, nbytes: int, name: str) -> HostBuffer | DeviceBuffer:
    """Return memory on ``device``; raise OSError or OutOfMemoryError where there is none.

    The kernel shows ``name`` for host memory.
    """
    if device.type == "cuda":
        return DeviceBuffer.allocate(nbytes)
    return HostBuffer.allocate(nbytes, name)
