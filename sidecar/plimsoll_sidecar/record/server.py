"""Serve ``/metrics`` for Prometheus, ``/state`` for ``plimsoll watch``, and an HTML page.

Clients cannot change anything through this server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_api.page_security import (
    CONTENT_SECURITY_POLICY,
    is_ip_address,
    normalize_host,
    parse_host_name,
)
from plimsoll_sidecar import web
from plimsoll_sidecar.background import BackgroundThread
from plimsoll_sidecar.record.metrics import CONTENT_TYPE

SECURITY_HEADERS = (
    f"Content-Security-Policy: {CONTENT_SECURITY_POLICY}\r\nX-Content-Type-Options: nosniff\r\n"
)
# Many clients then cause no more work than one.
PAGE_CACHE_TTL_S = 0.5
MAX_EVENT_WAIT_S = 60.0


class StateServer:
    """Serves the metrics, the state and the page in a thread.

    Args:
        host: The address to listen on.
        port: The TCP port; 0 for a free port.
        render_metrics: Returns the metrics in the Prometheus text format.
        get_state: Returns the state as JSON.
        render_page: Returns the HTML page. The argument states whether the page reloads itself.
        hosts: The Host headers that the server accepts.

    Raises:
        OSError: If the server cannot listen on the port.

    """

    def __init__(
        self,
        host: str,
        port: int,
        render_metrics: Callable[[], bytes],
        get_state: Callable[[], bytes],
        render_page: Callable[[bool], bytes],
        hosts: AllowedHosts,
    ) -> None:
        html = "text/html; charset=utf-8"
        self._hosts = hosts
        self._pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": (html, make_cached_renderer(lambda: render_page(False))),
            "/live": (html, make_cached_renderer(lambda: render_page(True))),
            "/metrics": (CONTENT_TYPE, make_cached_renderer(render_metrics)),
            "/state": ("application/json", get_state),
            "/healthz": (web.TEXT_CONTENT_TYPE, lambda: b"ok\n"),
        }
        try:
            self._server = web.HttpServer(host, port, self._respond, SECURITY_HEADERS)
        except OSError as error:
            raise OSError(
                f"cannot listen on the metrics port {host}:{port}: {error.strerror}"
            ) from error
        self._wake, self._wake_write = os.pipe()
        self._server.watch(self._wake)
        self._thread = BackgroundThread("state-server", self._handle_events)

    @property
    def port(self) -> int:
        """TCP port on which the server listens."""
        return self._server.port

    def start(self) -> None:
        """Start serving, in a thread that ends with the process."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close all connections."""
        self._thread.stop()
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._server.close()
        os.close(self._wake)
        os.close(self._wake_write)

    def _handle_events(self) -> float:
        self._server.handle_events(MAX_EVENT_WAIT_S)
        return 0.0

    def _respond(self, request: web.Request) -> web.Response:
        refused = self._hosts.explain_refusal(request.host)
        if refused is not None:
            return 403, web.TEXT_CONTENT_TYPE, f"{refused}\n".encode()
        page = self._pages.get(request.path)
        if page is None:
            return (
                404,
                web.TEXT_CONTENT_TYPE,
                f"path not found: this server serves only {', '.join(self._pages)}\n".encode(),
            )
        content, make = page
        return 200, content, make()


def make_cached_renderer(render: Callable[[], bytes]) -> Callable[[], bytes]:
    """Return a function that caches the result of ``render``. It is not thread-safe."""
    content, at = b"", float("-inf")

    def get() -> bytes:
        nonlocal content, at
        if time.monotonic() - at >= PAGE_CACHE_TTL_S:
            content = render()
            at = time.monotonic()
        return content

    return get


# Further allowed host names, separated by commas: for example, the host of an Ingress.
ALLOWED_HOSTS_ENV = "PLIMSOLL_ALLOWED_HOSTS"
RESOLV_CONF = Path("/etc/resolv.conf")
LOCALHOST = "localhost"


class AllowedHosts:
    """Host headers that the server accepts.

    The check prevents a website from reading the page through a browser (DNS rebinding). IP
    addresses are always allowed, because Prometheus and the operator use the pod's address.
    """

    def __init__(
        self,
        pod: str,
        service: str,
        namespace: str,
        domains: Iterable[str] = (),
        configured: Iterable[str] = (),
    ) -> None:
        parents = ["", f".{namespace}", f".{namespace}.svc"]
        parents += [f".{namespace}.svc.{domain}" for domain in domains]
        own = {f"{base}{parent}" for base in (pod, service) for parent in parents if base}
        self._names = {normalize_host(name) for name in (*own, *configured) if name.strip()} | {
            LOCALHOST
        }
        self._example = f"{service}.{namespace}.svc"

    @classmethod
    def create_for_pod(cls, pod: str, service: str, namespace: str) -> AllowedHosts:
        """Return the allowed hosts of a pod, with those in :data:`ALLOWED_HOSTS_ENV`."""
        configured = os.environ.get(ALLOWED_HOSTS_ENV, "").split(",")
        return cls(pod, service, namespace, read_cluster_domains(), configured)

    def explain_refusal(self, host: str | None) -> str | None:
        """Return the reason to refuse a request with this Host header; None if allowed."""
        if host is None:
            return None
        name = parse_host_name(host)
        if name in self._names or name.endswith(f".{LOCALHOST}") or is_ip_address(name):
            return None
        return (
            f"the supervisor does not accept the Host header {host[:253]!r}: use its IP "
            f"address, {LOCALHOST} or {self._example}, or add the name to "
            f"{ALLOWED_HOSTS_ENV} in the environment of the supervisor's container"
        )


def read_cluster_domains(file: Path = RESOLV_CONF) -> list[str]:
    """Return the cluster's domains from the resolver's search list; empty outside a cluster."""
    try:
        lines = file.read_bytes().decode(errors="replace").splitlines()
    except OSError:
        return []
    words = [word for line in lines if line.startswith("search") for word in line.split()[1:]]
    return [word.removeprefix("svc.") for word in words if word.startswith("svc.")]
