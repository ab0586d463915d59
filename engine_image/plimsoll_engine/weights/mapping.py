"""Map the weights and the KV pool of the weight server into a worker's address space."""

from __future__ import annotations

import contextlib
import socket

import torch

from plimsoll_engine.device.buffer import CudaError, DeviceBuffer
from plimsoll_engine.errors import LoadError
from plimsoll_engine.messages import weight_ipc
from plimsoll_engine.messages.weight_ipc import MappingLostError
from plimsoll_engine.weights.layout import make_views
from plimsoll_engine.weights.memory import Buffer, HostBuffer


class WeightMapping:
    """Connection of one rank to the weight server, with the buffers that the rank has mapped.

    The constructor requests the weights, so the server loads them while the worker starts.
    """

    def __init__(self, path: str, rank: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer: Buffer | None = None
        self._pool: Buffer | None = None
        # Empty before map_weights().
        self.identity = b""
        # Empty before map_pool().
        self.pool_identity = b""
        try:
            self._socket.connect(path)
            weight_ipc.send_message(self._socket, weight_ipc.WeightsRequest(rank))
        except OSError as error:
            self._socket.close()
            raise MappingLostError(
                f"cannot connect to the weight server at {path}: {error}"
            ) from None

    @property
    def nbytes(self) -> int:
        """Size of the mapped weights in bytes; 0 after :meth:`unmap`."""
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def pool_nbytes(self) -> int:
        """Size of the mapped KV pool in bytes; 0 without a pool and after :meth:`unmap`."""
        return 0 if self._pool is None else self._pool.nbytes

    def map_weights(self) -> dict[str, torch.Tensor]:
        """Wait for the weights, map them, and return them by name. Do not write to them.

        Raises LoadError if the weights can never be loaded, and MappingLostError or RuntimeError if
        a later attempt may succeed.
        """
        reply, fd = self._receive()
        match reply:
            case weight_ipc.SharedWeights(manifest, bytes(handle)):
                self._buffer = DeviceBuffer.map(handle, manifest.nbytes)
            case weight_ipc.SharedWeights(manifest) if fd is not None:
                self._buffer = HostBuffer.map(fd)
            case _:
                raise MappingLostError(
                    "the weight server's reply has neither a memory handle nor a file descriptor"
                )
        self.identity = reply.identity
        return make_views(self._buffer.as_tensor(), manifest)

    def map_pool(self, nbytes: int = 0) -> torch.Tensor | None:
        """Map the weight server's memory for the KV pool, and return it as uint8 [bytes].

        An existing pool keeps its contents. If there is none, the server allocates ``nbytes``
        bytes, or this returns None if ``nbytes`` is 0. Raises MappingLostError or RuntimeError.
        """
        weight_ipc.send_message(self._socket, weight_ipc.PoolRequest(nbytes))
        reply, fd = self._receive()
        if not isinstance(reply, weight_ipc.SharedPool):
            raise MappingLostError(
                "the weight server sent an unexpected reply to the request for the KV pool"
            )
        if reply.handle is not None:
            self._pool = DeviceBuffer.map(reply.handle, reply.nbytes)
        elif fd is not None:
            self._pool = HostBuffer.map(fd, is_writable=True)
        else:
            return None
        self.pool_identity = reply.identity
        return self._pool.as_tensor()

    def claim_pool(self) -> bool:
        """Register this worker as a writer of the KV pool. Return True if it is the only writer.

        Raises RuntimeError if a crashed worker has damaged the weights, and MappingLostError.
        """
        weight_ipc.send_message(self._socket, weight_ipc.PoolClaim())
        reply, _ = self._receive()
        if not isinstance(reply, weight_ipc.PoolClaimReply):
            raise MappingLostError(
                "the weight server sent an unexpected reply to the claim of the KV pool"
            )
        return reply.is_sole_writer

    def _receive(self) -> tuple[weight_ipc.Reply, int | None]:
        reply, fd = weight_ipc.receive_reply(self._socket)
        if isinstance(reply, weight_ipc.MappingRefusal):
            raise LoadError(reply.message) if reply.permanent else RuntimeError(reply.message)
        return reply, fd

    def unmap(self) -> bool:
        """Unmap all buffers, and disconnect. Idempotent.

        The tensors of the buffers become invalid. Return True if it is certain that this process
        can no longer write to the KV pool.
        """
        fenced = False
        if self._buffer is not None:
            # A lost device rejects all calls. Its mapping ends with the process, and the weight
            # server sees the closed connection instead of a MappingReleased message.
            with contextlib.suppress(CudaError):
                unmapped = self._pool is None or self._pool.close()
                self._buffer.close()
                self._send_released()
                fenced = unmapped
            self._buffer = self._pool = None
        self._socket.close()
        return fenced

    def _send_released(self) -> None:
        with contextlib.suppress(MappingLostError):  # the weight server has exited
            weight_ipc.send_message(self._socket, weight_ipc.MappingReleased())
