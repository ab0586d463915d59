"""``/metrics`` for Prometheus, ``/state`` for the terminal view, ``/`` for a browser: read-only."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_sidecar import web
from plimsoll_sidecar.background import Part
from plimsoll_sidecar.record.metrics import CONTENT_TYPE

SECURITY = "default-src 'none'; style-src 'unsafe-inline'"
"""No script runs and nothing is fetched."""
HEADERS = f"Content-Security-Policy: {SECURITY}\r\nX-Content-Type-Options: nosniff\r\n"
KEPT_S = 0.5
"""A page is made at most this often, however many clients ask: they share its bytes."""
IDLE_S = 60.0


class StateServer:
    """Serves what the callables return, from a thread of its own.

    ``page`` takes whether the page reloads itself. Raises OSError with host and port if the port is
    taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Callable[[], bytes],
        state: Callable[[], bytes],
        page: Callable[[bool], bytes],
        hosts: Hosts,
    ) -> None:
        html = "text/html; charset=utf-8"
        self._hosts = hosts
        self._pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": (html, cached(lambda: page(False))),
            "/live": (html, cached(lambda: page(True))),
            "/metrics": (CONTENT_TYPE, cached(metrics)),
            "/state": ("application/json", state),
            "/healthz": (web.TEXT, lambda: b"ok\n"),
        }
        try:
            self._server = web.HttpServer(host, port, self._answer, HEADERS)
        except OSError as error:
            raise OSError(f"metrics port {host}:{port}: {error.strerror}") from error
        self._wake, self._wake_write = os.pipe()
        self._server.watch(self._wake)
        self._part = Part("state-server", self._turn)

    @property
    def port(self) -> int:
        """The TCP port that it listens on, also where it was asked for port 0."""
        return self._server.port

    def start(self) -> None:
        """Begin to serve, in a thread that ends with the process."""
        self._part.start()

    def stop(self) -> None:
        """End the thread and close every connection."""
        self._part.stop()
        os.write(self._wake_write, b"x")
        self._part.join()
        self._server.close()
        os.close(self._wake)
        os.close(self._wake_write)

    def _turn(self) -> float:
        self._server.turn(IDLE_S)
        return 0.0

    def _answer(self, request: web.Request) -> web.Answer:
        refused = self._hosts.refused(request.host)
        if refused is not None:
            return 403, web.TEXT, f"{refused}\n".encode()
        found = self._pages.get(request.path)
        if found is None:
            return 404, web.TEXT, f"not found; this server has {', '.join(self._pages)}\n".encode()
        content, make = found
        return 200, content, make()


def cached(make: Callable[[], bytes]) -> Callable[[], bytes]:
    """``make``, whose result serves for the next half second. For one thread."""
    made, at = b"", float("-inf")

    def get() -> bytes:
        nonlocal made, at
        if time.monotonic() - at >= KEPT_S:
            made = make()
            at = time.monotonic()
        return made

    return get


CONFIGURED = "PLIMSOLL_ALLOWED_HOSTS"
"""Environment: more names that may be asked by, such as an ingress's, separated by commas."""
RESOLV_CONF = Path("/etc/resolv.conf")
LOCAL = "localhost"


class Hosts:
    """Which Host headers the page answers: a web site must not read it through a browser of ours.

    By DNS rebinding a name of another site leads to a pod or to a forwarded port, and the browser
    takes the page for that site's own. The name is in the Host header. An IP address cannot be
    rebound, so that every one is allowed: Prometheus and the operator ask by the pod's.
    """

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
