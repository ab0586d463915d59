"""An API server of EndpointSlices on loopback: pages, label selectors, errors."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from plimsoll_sidecar.clients.kube import SERVICE_NAME_LABEL, EndpointSlices, KubeClient

PATH = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"


class ApiServer:
    """``slices`` is what is stored; ``answer``, if set, is status, headers and body of all."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.queries: list[dict[str, str]] = []
        self.answer: tuple[int, dict[str, str], bytes] | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                url = urlsplit(self.path)
                outer.queries.append(dict(parse_qsl(url.query)))
                status, headers, body = outer.answer or (200, {}, outer._list(outer.queries[-1]))
                if outer.answer is None and url.path != PATH:
                    status, body = 404, b'{"kind":"Status","message":"nothing here"}'
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET

            def log_message(self, format: str, *args: object) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.kube = KubeClient(f"http://127.0.0.1:{self._http.server_port}")
        self.endpoint_slices = EndpointSlices(self.kube, "ns")
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def add(self, service: str, endpoints: list[dict[str, Any]]) -> None:
        """Store one more slice of ``service``."""
        self.slices.append(
            {"metadata": {"labels": {SERVICE_NAME_LABEL: service}}, "endpoints": endpoints}
        )

    def _list(self, query: dict[str, str]) -> bytes:
        found = self.slices
        if selector := query.get("labelSelector"):
            name, _, rest = selector.partition(" in ")
            values = rest.strip("()").split(",")
            found = [one for one in found if one["metadata"]["labels"].get(name) in values]
        begin, limit = int(query.get("continue", 0)), int(query.get("limit", len(found) or 1))
        following = str(begin + limit) if begin + limit < len(found) else ""
        page = {"metadata": {"continue": following}, "items": found[begin : begin + limit]}
        return json.dumps(page).encode()


def endpoint(name: str, address: str = "10.0.0.1", **conditions: bool) -> dict[str, Any]:
    return {"targetRef": {"name": name}, "addresses": [address], "conditions": conditions}
