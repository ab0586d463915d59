"""A worker's mappings of weights and KV pool, which the weight server owns."""

from __future__ import annotations

import contextlib
import socket

import torch

from plimsoll_engine.device.buffer import CudaError, DeviceBuffer
from plimsoll_engine.errors import LoadError
from plimsoll_engine.messages import weight_ipc
from plimsoll_engine.messages.weight_ipc import MappingLost
from plimsoll_engine.weights.layout import make_views
from plimsoll_engine.weights.memory import Buffer, HostBuffer


class WeightMapping:
    """Connection of one rank to the weight server, and the buffers it has mapped.

    The constructor connects, so that the weight server can load while the worker creates its CUDA
    context.
    """

    def __init__(self, path: str, rank: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer: Buffer | None = None
        self._pool: Buffer | None = None
        self.identity = b""
        """Identity of the mapped weights; empty before."""
        self.pool_identity = b""
        """Identity of the mapped KV pool; empty before."""
        try:
            self._socket.connect(path)
            weight_ipc.send_message(self._socket, weight_ipc.WeightsRequest(rank))
        except OSError as error:
            self._socket.close()
            raise MappingLost(f"cannot connect to the weight server at {path}: {error}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of the mapped weights; 0 after :meth:`end`."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the mapped KV pool; 0 without a pool and after :meth:`end`."""
        return 0 if self._pool is None else self._pool.nbytes

    def map_weights(self) -> dict[str, torch.Tensor]:
        """Map the weights and return them by name. They are shared: do not write to them.

        Waits until the weight server has loaded them; the frontend's startup timeout limits the
        wait. Raises LoadError, MappingLost and RuntimeError.
        """
        answer, fd = self._receive()
        match answer:
            case weight_ipc.SharedWeights(manifest, bytes(handle)):
                self._buffer = DeviceBuffer.map(handle, manifest.nbytes)
            case weight_ipc.SharedWeights(manifest) if fd is not None:
                self._buffer = HostBuffer.map(fd)
            case _:
                raise MappingLost(
                    "the weight server's reply has neither a memory handle nor a file descriptor"
                )
        self.identity = answer.identity
        return make_views(self._buffer.as_tensor(), manifest)

    def map_pool(self, nbytes: int = 0) -> torch.Tensor | None:
        """Return the weight server's memory for the KV pool, uint8 [bytes].

        A predecessor's pool is returned with its contents. Otherwise ``nbytes`` are allocated; None
        if that is 0. Call :meth:`map_weights` first. Raises MappingLost and RuntimeError.
        """
        weight_ipc.send_message(self._socket, weight_ipc.PoolRequest(nbytes))
        answer, fd = self._receive()
        if not isinstance(answer, weight_ipc.SharedPool):
            raise MappingLost(
                "the weight server sent an unexpected reply to the request for the KV pool"
            )
        if answer.handle is not None:
            self._pool = DeviceBuffer.map(answer.handle, answer.nbytes)
        elif fd is not None:
            self._pool = HostBuffer.map(fd, writable=True)
        else:
            return None
        self.pool_identity = answer.identity
        return self._pool.as_tensor()

    def claim_pool(self) -> bool:
        """Register this worker as a writer of the KV pool. Return whether it is the only one.

        Raises MappingLost, and RuntimeError if a crashed worker has damaged the weights.
        """
        weight_ipc.send_message(self._socket, weight_ipc.PoolClaim())
        answer, _ = self._receive()
        if not isinstance(answer, weight_ipc.PoolClaimReply):
            raise MappingLost(
                "the weight server sent an unexpected reply to the claim of the KV pool"
            )
        return answer.is_sole_writer

    def _receive(self) -> tuple[weight_ipc.Reply, int | None]:
        answer, fd = weight_ipc.receive_reply(self._socket)
        if isinstance(answer, weight_ipc.MappingRefusal):
            raise LoadError(answer.message) if answer.permanent else RuntimeError(answer.message)
        return answer, fd

    def end(self) -> bool:
        """Unmap all buffers and disconnect. Idempotent.

        Return whether this process can no longer write to the pool. Tensors of the mapping become
        invalid.
        """
        fenced = False
        if self._buffer is not None:
            # A lost device accepts no calls: its mapping ends with the process, and the weight
            # server
            # notices the closed connection instead of a Returned message.
            with contextlib.suppress(CudaError):
                unmapped = self._pool is None or self._pool.close()
                self._buffer.close()
                self._send_returned()
                fenced = unmapped
            self._buffer = self._pool = None
        self._socket.close()
        return fenced

    def _send_returned(self) -> None:
        with contextlib.suppress(MappingLost):  # the weight server has exited
            weight_ipc.send_message(self._socket, weight_ipc.MappingReleased())
