"""Which Host headers the page answers: a web site must not read it through a browser of ours.

By DNS rebinding a name of another site leads to a pod or to a forwarded port, and the browser
takes the page for that site's own. The name is in the Host header. An IP address cannot be rebound,
so that every one is allowed: Prometheus and the operator ask by the pod's.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

CONFIGURED = "PLIMSOLL_ALLOWED_HOSTS"
"""Environment: more names that may be asked by, such as an ingress's, separated by commas."""
RESOLV_CONF = Path("/etc/resolv.conf")
LOCAL = "localhost"


class Hosts:
    """The names of one supervisor."""

    def __init__(
        self,
        pod: str,
        service: str,
        namespace: str,
        domains: Iterable[str] = (),
        configured: Iterable[str] = (),
    ) -> None:
        """``domains`` are the cluster's, such as ``cluster.local``."""
        parents = ["", f".{namespace}", f".{namespace}.svc"]
        parents += [f".{namespace}.svc.{domain}" for domain in domains]
        own = {f"{base}{parent}" for base in (pod, service) for parent in parents if base}
        self._names = {_plain(name) for name in (*own, *configured) if name.strip()} | {LOCAL}
        self._example = f"{service}.{namespace}.svc"

    @classmethod
    def of_pod(cls, pod: str, service: str, namespace: str) -> Hosts:
        """With the cluster's domains from the resolver's search list, and the configured names."""
        configured = os.environ.get(CONFIGURED, "").split(",")
        return cls(pod, service, namespace, cluster_domains(), configured)

    def refused(self, host: str | None) -> str | None:
        """Why a request with this Host header is not answered; None where it is.

        HTTP/1.0 needs no header, and no browser speaks it.
        """
        if host is None:
            return None
        name = _plain(_without_port(host))
        if name in self._names or name.endswith(f".{LOCAL}") or _is_address(name):
            return None
        return (
            f"This supervisor does not serve host {host[:253]!r}. Use its IP address,"
            f" {LOCAL} or {self._example}, or add the name to {CONFIGURED} in the environment"
            " of the supervisor's container."
        )


def cluster_domains(file: Path = RESOLV_CONF) -> list[str]:
    """``svc.DOMAIN`` of the search list; empty outside a cluster."""
    try:
        lines = file.read_bytes().decode(errors="replace").splitlines()
    except OSError:
        return []
    found = [word for line in lines if line.startswith("search") for word in line.split()[1:]]
    return [word.removeprefix("svc.") for word in found if word.startswith("svc.")]


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and ":" not in name else host


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
