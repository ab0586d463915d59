"""What a connection takes for a request, from its bytes."""

from __future__ import annotations

import h11
import pytest

from plimsoll_engine.http.limits import MAX_HEADER_BYTES, MAX_SMALL_CHUNKS, MIN_CHUNK_BYTES
from plimsoll_engine.http.request_framing import StrictConnection


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        ("/v1/models", "sent", "/v1/models"),
        ("http://other:8000/v1/models?a=b", "other:8000", "/v1/models?a=b"),
        ("HTTPS://other/v1//models", "other", "/v1//models"),
        ("http://[::1]:8000", "[::1]:8000", "/"),
        ("http://other?a=http://third/", "other", "/?a=http://third/"),
        ("/http://other/", "sent", "/http://other/"),
        ("http://user@other/", "sent", "http://user@other/"),
        ("http:///v1/models", "sent", "http:///v1/models"),
    ],
)
def test_a_target_may_be_a_url_whose_host_counts(target: str, host: str, path: str) -> None:
    connection = StrictConnection()
    connection.receive_data(f"GET {target} HTTP/1.1\r\nX: y\r\nHost: sent\r\n\r\n".encode())
    request = connection.next_event()
    assert request.target == path.encode()
    assert sorted(request.headers) == [(b"host", host.encode()), (b"x", b"y")]
    assert isinstance(connection.next_event(), h11.EndOfMessage)


@pytest.mark.parametrize("piece", [MAX_HEADER_BYTES * 2, 1024])
@pytest.mark.parametrize(
    "long", ["GET /" + "a" * MAX_HEADER_BYTES, "GET / HTTP/1.1\r\nX: " + "a" * MAX_HEADER_BYTES]
)
def test_a_header_is_bounded_in_one_piece_and_in_many(piece: int, long: str) -> None:
    sent = f"{long} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    connection = StrictConnection()

    def receive() -> None:
        for start in range(0, len(sent), piece):
            connection.receive_data(sent[start : start + piece])
            connection.next_event()

    with pytest.raises(h11.RemoteProtocolError):
        receive()
    assert connection.error_message is not None
    assert f"larger than the maximum of {MAX_HEADER_BYTES} bytes" in connection.error_message


def receive_chunks(connection: StrictConnection, size: int, count: int) -> None:
    connection.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.receive_data((b"%x\r\n%s\r\n" % (size, b"x" * size)) * count + b"0\r\n\r\n")
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    connection.send(h11.Response(status_code=204, headers=[]))
    connection.send(h11.EndOfMessage())
    connection.start_next_cycle()


def test_a_body_may_have_many_chunks_if_they_are_not_small() -> None:
    connection = StrictConnection()
    for size, count in ((1, MAX_SMALL_CHUNKS), (MIN_CHUNK_BYTES, 20_000), (1, MAX_SMALL_CHUNKS)):
        receive_chunks(connection, size, count)
    with pytest.raises(h11.RemoteProtocolError):
        receive_chunks(connection, MIN_CHUNK_BYTES // 2, 3 * MAX_SMALL_CHUNKS)
    assert connection.error_message is not None
    assert "send larger chunks" in connection.error_message
