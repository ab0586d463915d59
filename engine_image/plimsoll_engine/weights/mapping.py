"""The worker's end: weights and KV pool of the weight server, as views of its buffers."""

from __future__ import annotations

import contextlib
import socket

import torch

from plimsoll_engine.device.buffer import CudaError, DeviceBuffer
from plimsoll_engine.errors import LoadError
from plimsoll_engine.messages import weight_ipc
from plimsoll_engine.messages.weight_ipc import MappingLost
from plimsoll_engine.weights.layout import views
from plimsoll_engine.weights.memory import Buffer, HostBuffer


class WeightMapping:
    """Connects at once, so that the weight server loads while the worker makes its context."""

    def __init__(self, path: str, rank: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer: Buffer | None = None
        self._pool: Buffer | None = None
        self.identity = b""
        """Of the weights, once they are mapped."""
        self.pool_identity = b""
        """Of the memory of the KV pool, once it is mapped."""
        try:
            self._socket.connect(path)
            weight_ipc.send(self._socket, weight_ipc.WeightsRequest(rank))
        except OSError as error:
            self._socket.close()
            raise MappingLost(f"weight server's socket {path}: {error}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of the mapped weights; zero after it was closed."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the mapped KV pool; zero without one and after it was closed."""
        return 0 if self._pool is None else self._pool.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by name, read-only by contract: every worker sees the same bytes.

        Waits for the weight server to load them; the frontend's startup timeout bounds the wait.
        Raises LoadError, MappingLost and RuntimeError.
        """
        answer, fd = self._receive()
        match answer:
            case weight_ipc.WeightsShared(manifest, bytes(handle)):
                self._buffer = DeviceBuffer.map(handle, manifest.nbytes)
            case weight_ipc.WeightsShared(manifest) if fd is not None:
                self._buffer = HostBuffer.map(fd)
            case _:
                raise MappingLost("weight server: neither a handle nor a descriptor came")
        self.identity = answer.identity
        return views(self._buffer.tensor(), manifest)

    def pool(self, nbytes: int = 0) -> torch.Tensor | None:
        """Return the weight server's memory for the KV pool, uint8 [bytes].

        It makes ``nbytes`` where it has none; without a size None there. What a predecessor wrote
        is still in it.

        After :meth:`tensors`. Raises MappingLost and RuntimeError.
        """
        weight_ipc.send(self._socket, weight_ipc.PoolRequest(nbytes))
        answer, fd = self._receive()
        if not isinstance(answer, weight_ipc.PoolShared):
            raise MappingLost("weight server: its answer is not the KV pool")
        if answer.handle is not None:
            self._pool = DeviceBuffer.map(answer.handle, answer.nbytes)
        elif fd is not None:
            self._pool = HostBuffer.map(fd, writable=True)
        else:
            return None
        self.pool_identity = answer.identity
        return self._pool.tensor()

    def claim_pool(self) -> bool:
        """Say that this worker writes to the pool from now on; whether no other may any more.

        Raises MappingLost, and RuntimeError where a worker that crashed has changed the weights.
        """
        weight_ipc.send(self._socket, weight_ipc.PoolClaim())
        answer, _ = self._receive()
        if not isinstance(answer, weight_ipc.PoolClaimed):
            raise MappingLost("weight server: its answer is not about the claim")
        return answer.alone

    def _receive(self) -> tuple[weight_ipc.Answer, int | None]:
        answer, fd = weight_ipc.receive(self._socket)
        if isinstance(answer, weight_ipc.WeightsRefused):
            raise LoadError(answer.message) if answer.permanent else RuntimeError(answer.message)
        return answer, fd

    def end(self) -> bool:
        """Unmap, then tell the weight server. No view may be used after this. Idempotent.

        True where nothing of this process can write to the KV pool any more.
        """
        fenced = False
        if self._buffer is not None:
            # A device that is lost takes no calls; the mapping then ends with the process, and the
            # connection is cut, not returned.
            with contextlib.suppress(CudaError):
                unmapped = self._pool is None or self._pool.close()
                self._buffer.close()
                self._returned()
                fenced = unmapped
            self._buffer = self._pool = None
        self._socket.close()
        return fenced

    def _returned(self) -> None:
        with contextlib.suppress(MappingLost):  # the weight server is gone: nobody to tell
            weight_ipc.send(self._socket, weight_ipc.Returned())
