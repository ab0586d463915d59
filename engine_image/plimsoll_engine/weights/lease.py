"""The worker's end: weights and KV pool borrowed from the holder, as views of its buffers."""

from __future__ import annotations

import contextlib
import socket

import torch

from plimsoll_engine.models.loader import LoadError
from plimsoll_engine.weights import lending
from plimsoll_engine.weights.cuda import CudaError, DeviceBuffer
from plimsoll_engine.weights.layout import views
from plimsoll_engine.weights.lending import LeaseCut
from plimsoll_engine.weights.memory import Buffer, HostBuffer


class Lease:
    """Connects at once, so that the holder loads while the worker makes its context."""

    def __init__(self, path: str, rank: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer: Buffer | None = None
        self._pool: DeviceBuffer | None = None
        try:
            self._socket.connect(path)
            lending.send(self._socket, lending.WeightsAsked(rank))
        except OSError as error:
            self._socket.close()
            raise LeaseCut(f"weight holder's socket {path}: {error}") from None

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by name, read-only by contract: every worker sees the same bytes.

        Waits for the holder to load them; the frontend bounds the wait by its startup timeout.
        Raises LoadError, LeaseCut and RuntimeError.
        """
        answer, fd = self._receive()
        match answer:
            case lending.Lent(manifest, bytes(handle)):
                self._buffer = DeviceBuffer.map(handle, manifest.nbytes)
            case lending.Lent(manifest) if fd is not None:
                self._buffer = HostBuffer.map(fd)
            case _:
                raise LeaseCut("weight holder: neither a handle nor a descriptor came")
        return views(self._buffer.tensor(), manifest)

    def pool(self, nbytes: int = 0) -> torch.Tensor | None:
        """Device memory for the KV pool as uint8 [bytes]: the holder's, made with ``nbytes`` where
        it has none; without a size None there. What a predecessor wrote is still in it.

        On CUDA, after :meth:`tensors`. Raises LeaseCut and RuntimeError.
        """
        lending.send(self._socket, lending.PoolAsked(nbytes))
        answer, _ = self._receive()
        if not isinstance(answer, lending.LentPool):
            raise LeaseCut("weight holder: its answer is not the KV pool")
        if answer.handle is None:
            return None
        self._pool = DeviceBuffer.map(answer.handle, answer.nbytes)
        return self._pool.tensor()

    def _receive(self) -> tuple[lending.Answer, int | None]:
        answer, fd = lending.receive(self._socket)
        if isinstance(answer, lending.Refused):
            raise LoadError(answer.message) if answer.permanent else RuntimeError(answer.message)
        return answer, fd

    def end(self) -> None:
        """Unmap, then tell the holder. No view may be used after this. Again does nothing more."""
        if self._buffer is not None:
            # A device that is lost takes no calls; the mapping then ends with the process, and the
            # lease is cut, not returned.
            with contextlib.suppress(CudaError):
                if self._pool is not None:
                    self._pool.close()
                self._buffer.close()
                self._returned()
            self._buffer = self._pool = None
        self._socket.close()

    def _returned(self) -> None:
        with contextlib.suppress(LeaseCut):  # the holder is gone: nobody to tell
            lending.send(self._socket, lending.Returned())
