"""Messages between weight server and workers. Tests ``messages/weight_ipc.py``."""

from __future__ import annotations

import socket

import pytest

from plimsoll_engine.messages import weight_ipc
from plimsoll_engine.messages.weight_ipc import MappingLostError, MappingRefusal, PoolClaim


def test_an_answer_is_read_although_the_other_side_closed_right_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is refused hears why, however late it is back from sending its request."""
    worker, server = socket.socketpair()
    send_fds = socket.send_fds

    def answered(connection: socket.socket, *arguments: object) -> int:
        sent: int = send_fds(connection, *arguments)  # type: ignore[arg-type]
        if connection is worker:
            assert isinstance(weight_ipc.receive_request(server), PoolClaim)
            weight_ipc.send_message(server, MappingRefusal("why", permanent=False))
            server.close()
        return sent

    with worker, server:
        monkeypatch.setattr(socket, "send_fds", answered)
        weight_ipc.send_message(worker, PoolClaim())
        assert weight_ipc.receive_reply(worker) == (MappingRefusal("why", permanent=False), None)
        with pytest.raises(MappingLostError):
            weight_ipc.send_message(worker, PoolClaim())
