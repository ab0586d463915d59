"""Security of web pages: no external content, and no access by other web sites.

In a DNS rebinding attack, the name of a web site resolves to a pod or a forwarded port, and the
browser sends the site's name in the Host header. Requests with an IP address in it are safe.
"""

from __future__ import annotations

import ipaddress

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy that forbids scripts and external content."""


def parse_host_name(header: str) -> str:
    """Return the normalized host name or IP address in a Host header, without the port."""
    return normalize_host(_strip_port(header))


def normalize_host(name: str) -> str:
    """Return a host name in lower case, without surrounding spaces and without a trailing dot."""
    return name.strip().lower().removesuffix(".")


def is_ip_address(name: str) -> bool:
    """Report whether ``name`` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _strip_port(host: str) -> str:
    host = host.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and ":" not in name else host
