"""The engine's listening socket: what is written leaves at once.

Tests ``plimsoll_engine/server.py``.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from plimsoll_engine.server import _open_listening_socket


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_small_pieces_do_not_wait_for_an_acknowledgement(host: str) -> None:
    """With Nagle's algorithm the second write of an answer waits for the client's delayed ACK:
    40 ms on each answer over a connection that stays open."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    async def accepted() -> bool:
        nodelay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            nodelay.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(serve, sock=listener):
            _, writer = await asyncio.open_connection(host, listener.getsockname()[1])
            writer.close()
            return bool(await asyncio.wait_for(nodelay, 5))

    listener = _open_listening_socket(host, 0, "--port")
    assert asyncio.run(accepted())
