"""Pods of a multi-node group, each at an address of its own with a ``/state`` page."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.http_server import Handler, answering

WORKER, OTHER = "127.0.0.2", "127.0.0.3"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def serving(address: str, port: int, body: bytes, status: int = 200) -> Iterator[None]:
    class Pod(Handler):
        def do_GET(self) -> None:
            self.answer(status if self.path == "/state" else 404, body)

    with answering(Pod, address, port):
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((WORKER, 0))
        return int(probe.getsockname()[1])
