"""Sockets that take connections of both address families.

A kubelet probes a pod, and Prometheus scrapes it, at an address of the cluster's family: in a
cluster with IPv6 alone, a socket at ``0.0.0.0`` is never reached. Imports are few on purpose: the
supervisor's launcher uses this, too.
"""

from __future__ import annotations

import errno
import socket

EVERY_ADDRESS = "::"
"""All addresses of this machine or pod, of both families."""
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
"""Errors of a kernel or a sandbox without IPv6."""


def bound(host: str, port: int) -> socket.socket:
    """Return a TCP socket at ``host`` and ``port``; the caller lets it listen.

    :data:`EVERY_ADDRESS` takes IPv4 as well, and means IPv4 alone where there is no IPv6. Raises
    OSError, and OverflowError for a number that is no port.
    """
    if host == EVERY_ADDRESS:
        try:
            return _bound(socket.AF_INET6, host, port)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
            host = "0.0.0.0"
    return _bound(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # The protocol is named: asyncio turns Nagle off for sockets that say they are TCP only.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == EVERY_ADDRESS:
            # The default of this is a setting of the network namespace.
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind((host, port))
    except (OSError, OverflowError):
        found.close()
        raise
    return found
