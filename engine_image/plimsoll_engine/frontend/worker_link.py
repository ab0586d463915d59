"""The frontend's end of the worker socket: one worker at a time, the one of the present epoch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from plimsoll_engine import ipc
from plimsoll_engine.frontend.framing import read_body
from plimsoll_engine.frontend.outbox import Outbox

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7)

OnMessage = Callable[[ipc.FromWorker], None]
OnLost = Callable[[str], None]


class WorkerLink:
    """Accepts the worker that :meth:`expect` names and drops every other connection.

    ``on_message`` gets each message of the present worker; ``on_lost`` is told once when its
    connection ends, which :meth:`drop` does not count as.
    """

    def __init__(self, path: Path, on_message: OnMessage, on_lost: OnLost) -> None:
        self._path = path
        self._on_message = on_message
        self._on_lost = on_lost
        self._server: asyncio.Server | None = None
        self._expected: int | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self.outbox = Outbox()

    async def listen(self) -> None:
        """Once; a socket file that a killed predecessor left is taken over."""
        if self._server is not None:
            return
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, path=self._path)
        self._path.chmod(0o600)

    def expect(self, epoch: int) -> None:
        """From now on only the worker of ``epoch`` is heard."""
        self.drop()
        self._expected = epoch

    def drop(self) -> None:
        """Hear and tell the present worker nothing more."""
        self._expected = None
        self.outbox = Outbox()
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    def send(self, message: ipc.ToWorker) -> None:
        """Queue ``message``; a worker that does not read keeps nobody waiting."""
        self.outbox.put(message)
        self._work.set()

    async def close(self) -> None:
        self.drop()
        if self._server is not None:
            self._server.close()
        for task in list(self._readers):
            task.cancel()
        self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            if await self._is_expected(reader, writer):
                self._writer = writer
                self._flusher = asyncio.create_task(self._flush(writer), name="worker outbox")
                await self._read(reader, writer)
        except asyncio.CancelledError:
            pass  # the link closes; asyncio's own callback would log the cancellation as an error
        finally:
            self._readers.discard(task)
            writer.close()

    async def _is_expected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                body = await read_body(reader)
            hello = ipc.from_worker.decode(body or b"")
        except (TimeoutError, ValueError, msgspec.DecodeError) as error:
            log.warning("connection without a Hello dropped", extra={"error": str(error)})
            return False
        peer: socket.socket = writer.get_extra_info("socket")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, _, _ = _UCRED.unpack(raw)
        if not isinstance(hello, ipc.Hello) or hello.pid != pid or self._writer is not None:
            log.warning("connection of a stranger dropped", extra={"pid": pid})
            return False
        if hello.epoch != self._expected:
            log.warning(
                "worker of another epoch dropped",
                extra={"pid": pid, "worker_epoch": hello.epoch, "expected": self._expected},
            )
            return False
        self._on_message(hello)
        return True

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reason = "the worker closed its socket"
        try:
            while (body := await read_body(reader)) is not None:
                message = ipc.from_worker.decode(body)
                if self._writer is not writer:
                    return
                self._on_message(message)
        except (ValueError, msgspec.DecodeError) as error:
            reason = f"the worker sent what is no message: {error}"
        if self._writer is writer:
            self.drop()
            self._on_lost(reason)

    async def _flush(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                message = self.outbox.take()
                if message is None:
                    self._work.clear()
                    await self._work.wait()
                    continue
                writer.write(ipc.frame(message))
                await writer.drain()
