"""A server of whatever bytes a test wants, on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Send = Callable[[socket.socket], None]


@contextmanager
def serve(send: Send | bytes) -> Iterator[str]:
    """Answer each connection's request with ``send``, in a thread; yield the server's URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def one(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.recv(1 << 16)
            peer.sendall(send) if isinstance(send, bytes) else send(peer)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                threading.Thread(target=one, args=(peer,), daemon=True).start()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def ok(body: bytes) -> bytes:
    """Return a whole answer with ``body``."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
