"""The API server of a cluster whose certificates have no key identifiers, as EKS's.

Python 3.13 verifies strictly unless told otherwise, and refuses them; here every Python does.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
import urllib3
import yaml

from plimsoll_cli.cluster.client import Cluster
from plimsoll_cli.errors import RunError
from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.queue import RateLimit
from plimsoll_operator.runtime.watches import Login
from plimsoll_sidecar.clients.kube import KubeClient, KubeError
from tests.http_server import Handler
from tests.lab.certs import Authority

REFUSED = "Missing Authority Key Identifier"
EMPTY = {"metadata": {"resourceVersion": "1"}, "items": []}


class Answer(Handler):
    def do_GET(self) -> None:
        self.answer(200, json.dumps(EMPTY).encode(), "application/json")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients that refuse the certificate hang up; their own error says so."""


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults of Python 3.13 in any Python."""
    default = ssl.create_default_context

    def context(*arguments: Any, **named: Any) -> ssl.SSLContext:
        made = default(*arguments, **named)
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        return made

    def bare(protocol: int) -> ssl.SSLContext:
        made = ssl.SSLContext(protocol)
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        return made

    monkeypatch.setattr(ssl, "create_default_context", context)
    monkeypatch.setattr(urllib3.util.ssl_, "SSLContext", bare)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "pki")
    made.serving("server", "server", ["127.0.0.1"])
    made.client("admin", "admin")
    return made


@pytest.fixture
def server(authority: Authority) -> Iterator[str]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.folder / "server.crt", authority.folder / "server.key")
    with Server(("127.0.0.1", 0), Answer) as http:
        http.socket = tls.wrap_socket(http.socket, server_side=True)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.fixture
def kubeconfig(authority: Authority, server: str, tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    authority.kubeconfig("admin", server, path)
    return path


def test_the_supervisor_talks_to_it(authority: Authority, server: str) -> None:
    assert KubeClient(server, ca_file=authority.ca).get("/api") == EMPTY


def test_the_command_line_talks_to_it(kubeconfig: Path) -> None:
    assert Cluster(kubeconfig).get("/api") == EMPTY


def test_the_operator_talks_to_it(kubeconfig: Path) -> None:
    async def events() -> list[dict[str, Any]]:
        api = await Api.connect(str(kubeconfig), 10.0, RateLimit(10.0, 10))
        try:
            return await api.list_object_events("default", "some-uid")
        finally:
            await api.close()

    assert asyncio.run(events()) == []


def test_the_operators_watches_talk_to_it(authority: Authority, server: str) -> None:
    found = kopf.ConnectionInfo(server=server, ca_path=str(authority.ca), token="t")
    assert asyncio.run(status(server, Login.from_connection(found).as_ssl_context())) == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError, match=REFUSED):
        asyncio.run(status(server, found.as_ssl_context()))


def test_another_authority_is_refused(
    authority: Authority, server: str, kubeconfig: Path, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    other.client("admin", "admin")
    other.kubeconfig("admin", server, kubeconfig)
    with pytest.raises(KubeError, match="CERTIFICATE_VERIFY_FAILED"):
        KubeClient(server, ca_file=other.ca).get("/api")
    with pytest.raises(KubeError, match="CERTIFICATE_VERIFY_FAILED"):
        KubeClient(server).get("/api")
    with pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"):
        Cluster(kubeconfig).get("/api")


def test_another_host_is_refused(authority: Authority, server: str, kubeconfig: Path) -> None:
    elsewhere = server.replace("127.0.0.1", "localhost")
    with pytest.raises(KubeError, match="CERTIFICATE_VERIFY_FAILED"):
        KubeClient(elsewhere, ca_file=authority.ca).get("/api")
    authority.kubeconfig("admin", elsewhere, kubeconfig)
    with pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"):
        Cluster(kubeconfig).get("/api")


def test_a_kubeconfig_may_verify_nothing(kubeconfig: Path) -> None:
    config = yaml.safe_load(kubeconfig.read_text())
    del config["clusters"][0]["cluster"]["certificate-authority-data"]
    config["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    kubeconfig.write_text(json.dumps(config))
    assert Cluster(kubeconfig).get("/api") == EMPTY


async def status(url: str, tls: ssl.SSLContext) -> int:
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(connector=connector) as http, http.get(f"{url}/api") as answer:
        return answer.status
