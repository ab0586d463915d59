"""Frontend side of the worker socket: authentication, and one connection per worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from plimsoll_engine.caches.sender import MediaCacheSender
from plimsoll_engine.frontend.workers.outbox import Outbox
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import read_body

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
_UCRED = struct.Struct("3i")  # PID, uid, gid: unix(7)


class WorkerLink:
    """Connection to the worker of one epoch.

    ``on_lost`` is called once when the connection ends, unless :meth:`drop` has closed it.
    """

    def __init__(
        self,
        epoch_number: int,
        media_cache_bytes: int,
        on_message: Callable[[worker_ipc.FromWorker], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.number = epoch_number
        self.outbox = Outbox()
        self.media_sender = MediaCacheSender(media_cache_bytes)
        self._on_message = on_message
        self._on_lost = on_lost
        self._writer: asyncio.StreamWriter | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._dropped = False

    @property
    def is_open(self) -> bool:
        """Whether a worker may still connect."""
        return self._writer is None and not self._dropped

    def send(self, message: worker_ipc.ToWorker) -> None:
        """Queue ``message``. The call never blocks, even if the worker does not read."""
        if not self._dropped:
            self.outbox.put(message)
            self._work.set()

    def drop(self) -> None:
        """Close the connection, and ignore all later messages."""
        self._dropped = True
        self.outbox = Outbox()
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        if self._writer is not None:
            self._writer.transport.abort()

    async def serve(
        self, hello: worker_ipc.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Exchange messages with the worker until the connection ends."""
        self._writer = writer
        self._flusher = asyncio.create_task(self._flush(writer), name="worker outbox")
        self._on_message(hello)
        try:
            while (body := await read_body(reader)) is not None:
                message = worker_ipc.from_worker_decoder.decode(body)
                if self._dropped:
                    return
                self._on_message(message)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            log.error("the worker sent an invalid message", extra={"error": str(error)})
        if not self._dropped:
            self.drop()
            self._on_lost()

    async def _flush(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                message = self.outbox.take()
                if message is None:
                    self._work.clear()
                    await self._work.wait()
                    continue
                # Write without an await after packing: the sender assumes that what it packs is
                # sent, in that order.
                packed = self.media_sender.omit_cached_media(message)
                try:
                    frame = worker_ipc.encode_frame(packed)
                except (TypeError, ValueError, OverflowError) as error:
                    self._fail_unsendable(message, error)
                    continue
                writer.write(frame)
                await writer.drain()

    def _fail_unsendable(self, message: worker_ipc.ToWorker, error: Exception) -> None:
        # All other requests continue.
        log.error("cannot encode a message to the worker", extra={"error": str(error)})
        if isinstance(message, worker_ipc.Submit):
            why = f"the request cannot be sent to the worker: {error}"
            failed = [(message.request_id, message.attempt)]
            failed += [(choice.request_id, choice.attempt) for choice in message.choices]
            for request_id, attempt in failed:
                self._on_message(worker_ipc.RequestFailure(request_id, attempt, "error", why))


class WorkerSocket:
    """Socket to which workers connect. Each connection is passed to the worker's link."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._links: dict[int, WorkerLink] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Start to listen, and replace the socket file of a killed engine. Idempotent."""
        if self._server is not None:
            return
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, path=self._path)
        self._path.chmod(0o600)

    def expect(self, link: WorkerLink) -> None:
        """Allow the worker of ``link`` to connect."""
        self._links[link.number] = link

    def forget(self, link: WorkerLink) -> None:
        """Close the worker's connection, and refuse new ones from it."""
        link.drop()
        self._links.pop(link.number, None)

    async def close(self) -> None:
        """Close the socket and all connections."""
        for link in list(self._links.values()):
            self.forget(link)
        if self._server is not None:
            self._server.close()
        for task in list(self._readers):
            task.cancel()
        with contextlib.suppress(OSError):  # read-only
            self._path.unlink()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            hello = await self._read_hello(reader, writer)
            link = None if hello is None else self._links.get(hello.epoch)
            if hello is None:
                return
            if link is None or not link.is_open:
                log.warning(
                    "closed the connection of a worker that belongs to another epoch",
                    extra={"pid": hello.pid, "worker_epoch": hello.epoch},
                )
                return
            await link.serve(hello, reader, writer)
        except asyncio.CancelledError:
            pass  # the socket is being closed, and asyncio would log the cancellation as an error
        finally:
            self._readers.discard(task)
            writer.close()

    async def _read_hello(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> worker_ipc.Hello | None:
        # Returns None if the message or the peer is invalid.
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                body = await read_body(reader)
            hello = worker_ipc.from_worker_decoder.decode(body or b"")
        except (TimeoutError, ValueError, msgspec.DecodeError, RecursionError) as error:
            log.warning(
                "closed a connection that did not begin with a Hello message",
                extra={"error": str(error)},
            )
            return None
        peer: socket.socket = writer.get_extra_info("socket")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, _, _ = _UCRED.unpack(raw)
        if not isinstance(hello, worker_ipc.Hello) or hello.pid != pid:
            log.warning(
                "closed a connection from a process that is not a worker", extra={"pid": pid}
            )
            return None
        return hello
