"""One socket for both address families; tests/integration/test_address_families.py runs it."""

from __future__ import annotations

import errno
import socket

import pytest

from plimsoll_api.listening import ALL_ADDRESSES, bind_socket


def test_without_ipv6_in_the_kernel_every_address_is_ipv4s(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine of ours has such a kernel: what it answers is socket(2)'s EAFNOSUPPORT."""
    real = socket.socket

    def without(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *rest)

    monkeypatch.setattr(socket, "socket", without)
    with bind_socket(ALL_ADDRESSES, 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_port_that_ipv4_has_already_is_taken() -> None:
    with bind_socket("0.0.0.0", 0) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bind_socket(ALL_ADDRESSES, first.getsockname()[1])


def test_an_address_that_was_named_is_the_only_one() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with bind_socket("127.0.0.2", port):
            pass


@pytest.mark.parametrize("port", [-1, 1 << 16])
def test_a_number_that_is_no_port_is_an_error(port: int) -> None:
    with pytest.raises(OverflowError):
        bind_socket(ALL_ADDRESSES, port)
