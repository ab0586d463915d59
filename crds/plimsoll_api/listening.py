"""Sockets that accept both IPv4 and IPv6 connections.

In an IPv6-only cluster, a socket on ``0.0.0.0`` is unreachable. This module has few imports,
because the supervisor's launcher uses it.
"""

from __future__ import annotations

import errno
import socket

ALL_ADDRESSES = "::"
"""Host name for all addresses of this machine or pod, in both IP families."""
_NO_IPV6_ERRORS = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
"""Error numbers that indicate a kernel or sandbox without IPv6."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to ``host`` and ``port``, but does not listen yet.

    For :data:`ALL_ADDRESSES`, it accepts IPv6 and IPv4. Raises OSError, or OverflowError for an
    invalid port.
    """
    if host == ALL_ADDRESSES:
        try:
            return _bind_family(socket.AF_INET6, host, port)
        except OSError as error:
            if error.errno not in _NO_IPV6_ERRORS:
                raise
            host = "0.0.0.0"
    return _bind_family(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)


def _bind_family(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # asyncio disables Nagle's algorithm only for sockets with an explicit protocol.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == ALL_ADDRESSES:
            # Otherwise a setting of the network namespace applies.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except (OSError, OverflowError):
        bound.close()
        raise
    return bound
