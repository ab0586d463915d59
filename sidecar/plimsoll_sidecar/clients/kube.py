"""A small client of the Kubernetes API: what a supervisor needs, with bounded waits.

The projected token is read again for each request, since the kubelet renews it.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import urllib3
from urllib3.util.ssl_ import create_urllib3_context

from plimsoll_api.decoding import Malformed, decode

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
FIELD_MANAGER = "plimsoll-supervisor"

Object = dict[str, Any]


class KubeError(Exception):
    """A request that failed. ``status`` is 0 where there was no answer at all.

    ``retry_after_s`` is the server's own wish (429 and 503), in seconds.
    """

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def transient(self) -> bool:
        """Worth another try with the same request."""
        return self.status in (0, 408, 429) or self.status >= 500


class KubeClient:
    """``headers`` and certificates other than the pod's own are for use outside a cluster."""

    def __init__(
        self,
        server: str,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
    ) -> None:
        self._server = server.rstrip("/")
        self._token_file = token_file
        self._http = urllib3.PoolManager(
            maxsize=4,
            retries=False,
            ssl_context=_tls(own_ca=ca_file is not None),
            ca_certs=str(ca_file) if ca_file else None,
            cert_file=str(cert_file) if cert_file else None,
            key_file=str(key_file) if key_file else None,
        )

    @classmethod
    def in_cluster(cls) -> KubeClient | None:
        """Return the client of this pod's service account; None outside a cluster."""
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            return None
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", ACCOUNT / "token", ACCOUNT / "ca.crt")

    def get(self, path: str, **query: str) -> Object:
        """Read the object or list at ``path``. Raises KubeError, also with the status 404."""
        return self._call("GET", path, None, "application/json", query)

    def put(self, path: str, body: Object) -> Object:
        """Replace an object; its ``resourceVersion`` makes this a compare-and-swap (409)."""
        return self._call("PUT", path, body, "application/json", {})

    def create(self, path: str, body: Object) -> Object:
        """POST ``body`` to the collection ``path``; return the object as stored.

        Raises KubeError (409: it exists).
        """
        return self._call("POST", path, body, "application/json", {})

    def apply(self, path: str, body: Object) -> Object:
        """Server-side apply as the supervisor's field manager."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return self._call("PATCH", path, body, "application/apply-patch+yaml", query)

    def _call(
        self, method: str, path: str, body: Object | None, content: str, query: dict[str, str]
    ) -> Object:
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except OSError as error:
                message = f"service account token {self._token_file}: {error.strerror}"
                raise KubeError(0, message) from error
        data = None
        if body is not None:
            data, headers["Content-Type"] = msgspec.json.encode(body), content
        url = f"{self._server}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            response = self._http.request(
                method, url, body=data, headers=headers, timeout=TIMEOUT_S
            )
        except urllib3.exceptions.HTTPError as error:
            raise KubeError(0, f"{method} {path}: {error}") from error
        answer = _decode(response.data)
        if response.status < 300:
            return answer
        message = answer.get("message") or f"HTTP {response.status}"
        wait = response.headers.get("Retry-After", "")
        raise KubeError(
            response.status, f"{method} {path}: {message}", float(wait) if wait.isdigit() else None
        )


def _tls(own_ca: bool) -> ssl.SSLContext:
    """Verify certificates as kubectl does.

    Python 3.13 also demands key identifiers, which the CAs of many clusters, EKS's among them,
    lack. The pool adds the cluster's CA.
    """
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not own_ca:
        context.load_default_certs()
    return context


def _decode(data: bytes) -> Object:
    try:
        return decode(data, Object)
    except Malformed:
        return {}
