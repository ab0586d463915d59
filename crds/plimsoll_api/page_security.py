"""Rules for pages that people open in a browser: nothing is loaded, and no web site reads them.

With DNS rebinding, a web site's name leads to a pod or a forwarded port. The browser then treats
the page as that site's own, and the Host header has the site's name. An IP address cannot be
rebound.
"""

from __future__ import annotations

import ipaddress

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: no scripts, and nothing is loaded."""


def host_name(header: str) -> str:
    """Return the normalized name or address in a Host header, without its port."""
    return normalize_host(_without_port(header))


def normalize_host(name: str) -> str:
    """Return the name in lower case, without spaces around it and without a final dot."""
    return name.strip().lower().removesuffix(".")


def is_ip_address(name: str) -> bool:
    """Report whether ``name`` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    host = host.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and ":" not in name else host
