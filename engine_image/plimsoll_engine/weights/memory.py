"""Buffers of weights and of KV pools, which several processes share.

On CUDA, processes share device memory through an IPC handle. On a CPU, they share a memfd.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Protocol

import torch

from plimsoll_engine.device.buffer import DeviceBuffer


class Buffer(Protocol):
    """Buffer in shared memory. Do not use its tensors after you close it."""

    nbytes: int

    def as_tensor(self) -> torch.Tensor:
        """Return the whole buffer as uint8 [bytes]."""
        ...

    def close(self) -> bool:
        """Release the memory. Return False if the memory is still mapped into this process."""
        ...


class HostBuffer:
    """Buffer in shared host memory, which owns the file descriptor ``fd``."""

    def __init__(self, fd: int, nbytes: int, is_writable: bool) -> None:
        self.fd = fd
        self.nbytes = nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        # Populate all pages now, because pages that become resident while the worker serves would
        # look like growth.
        self._map: mmap.mmap | None = mmap.mmap(
            fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection
        )

    @classmethod
    def allocate(cls, nbytes: int, name: str) -> HostBuffer:
        """Return a new buffer with ``name`` in ``/proc/PID/maps``.

        Raises OSError if there is too little memory.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes, is_writable=True)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def map(cls, fd: int, is_writable: bool = False) -> HostBuffer:
        """Map the memory of ``fd``, and return it as a buffer that owns ``fd``.

        Unless ``is_writable``, a write to the memory causes a segmentation fault.
        """
        return cls(fd, os.fstat(fd).st_size, is_writable)

    def as_tensor(self) -> torch.Tensor:
        """Return the whole buffer as uint8 [bytes], without a copy."""
        assert self._map is not None
        with warnings.catch_warnings():
            # The mapping of weights is read-only on purpose.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> bool:
        """Unmap the buffer. Return False if a memoryview keeps it mapped. Idempotent.

        Afterwards, access to the buffer's tensors causes a segmentation fault.
        """
        if self._map is None:
            return True
        mapping, self._map = self._map, None
        os.close(self.fd)
        try:
            mapping.close()
        except BufferError:  # a memoryview still refers to it
            return False
        return True


def allocate_buffer(device: torch.device, nbytes: int, name: str) -> HostBuffer | DeviceBuffer:
    """Return a new shared buffer on ``device``.

    Host memory has ``name`` in ``/proc/PID/maps``. Raises OSError or OutOfMemoryError if there is
    too little memory.
    """
    if device.type == "cuda":
        return DeviceBuffer.allocate(nbytes)
    return HostBuffer.allocate(nbytes, name)
