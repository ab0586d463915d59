"""A thousand connections that say nothing, dribble or do not read: probes and scrapes get through.

On loopback everybody has one address, so that none of it is kept apart by address: the harder case.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plimsoll_sidecar import web
from plimsoll_sidecar.record.server import AllowedHosts, StateServer
from tests.ports import free_port

SILENT, DRIP, SLOW_READERS = 500, 400, 100
PROBE_LIMIT_S = 5.0
"""The kubelet's time-out of a probe (``timeoutSeconds``)."""
SCRAPE_LIMIT_S = 10.0
"""Prometheus' default ``scrape_timeout``."""
PROBES = 40
PAGE = b"# a page\n" * 15_000
LONG_PAGE = b"# a page that fits no socket buffer\n" * 200_000


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Both ends of a thousand connections in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Abuse:
    """Holds a thousand connections open and opens another for each that is closed."""

    def __init__(self, port: int, path: str) -> None:
        self.port, self.path, self.lost = port, path, 0
        self.full = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Abuse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join(30)

    def _run(self) -> None:
        kinds = ["silent"] * SILENT + ["drip"] * DRIP + ["reader"] * SLOW_READERS
        held: list[socket.socket | None] = [None] * len(kinds)
        while not self._ending.is_set():
            for index, kind in enumerate(kinds):
                held[index] = self._tend(kind, held[index])
            self.full.set()
        for connection in held:
            if connection is not None:
                connection.close()

    def _tend(self, kind: str, held: socket.socket | None) -> socket.socket | None:
        try:
            if held is None:
                held = socket.socket()
                held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                held.settimeout(1.0)
                held.connect(("127.0.0.1", self.port))
                held.setblocking(False)
                if kind == "reader":
                    held.send(f"GET {self.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            elif kind == "drip":
                held.send(b"GET /" if self._ending.is_set() else b"a")
            elif kind == "silent" and not held.recv(1):
                raise ConnectionError("closed")
        except BlockingIOError:
            return held
        except OSError:
            self.lost += 1
            if held is not None:
                held.close()
            return None
        return held


def timed_get(port: int, path: str, host: str = "localhost") -> tuple[int, bytes, float]:
    """Status, body and seconds."""
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SCRAPE_LIMIT_S)
    try:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read(), time.monotonic() - begin
    finally:
        connection.close()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Its child cannot start: this is about the launcher alone."""
    port = free_port()
    command = [sys.executable, "-m", "plimsoll_sidecar.launcher", "--host", "127.0.0.1"]
    command += ["--config", str(tmp_path / "absent"), "--run-dir", str(tmp_path / "run")]
    command += ["--state-dir", str(tmp_path / "state"), "--probe-port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                timed_get(port, "/ready")
                break
            except OSError:
                assert time.monotonic() < deadline, "the launcher does not answer"
                time.sleep(0.05)
        yield process, port
    finally:
        process.kill()
        process.wait(10)


def anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_probes_are_answered_beside_a_thousand_bad_connections(
    launcher: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, port = launcher
    before = anonymous(process.pid)
    with Abuse(port, "/ready") as abuse:
        assert abuse.full.wait(60)
        answers = [timed_get(port, "/ready") for _ in range(PROBES)]
        grown = anonymous(process.pid) - before
        descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
    assert {status for status, _, _ in answers} == {200}
    slowest = max(seconds for _, _, seconds in answers)
    print(f"slowest probe {slowest:.3f} s, launcher grown by {grown} bytes")
    assert slowest < PROBE_LIMIT_S
    assert descriptors <= web.MAX_CONNECTIONS + 16
    assert grown < 2 << 20


@contextmanager
def serving(
    metrics: Callable[[], bytes] = lambda: PAGE,
    page: Callable[[bool], bytes] = lambda live: b"<p>page</p>",
) -> Iterator[int]:
    hosts = AllowedHosts("pod-0", "qwen", "team-a", ["cluster.local"], ["plimsoll.example"])
    server = StateServer("127.0.0.1", 0, metrics, lambda: b"{}", page, hosts)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def test_metrics_are_scraped_beside_a_thousand_bad_connections() -> None:
    with serving() as port, Abuse(port, "/metrics") as abuse:
        assert abuse.full.wait(60)
        scrapes = [timed_get(port, "/metrics") for _ in range(20)]
    assert all(status == 200 and body == PAGE for status, body, _ in scrapes)
    slowest = max(seconds for _, _, seconds in scrapes)
    print(f"slowest scrape {slowest:.3f} s")
    assert slowest < SCRAPE_LIMIT_S


def test_a_slow_request_and_a_slow_reader_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr(web, "WRITE_TIMEOUT_S", 0.3)
    with serving(lambda: LONG_PAGE) as port:
        address = ("127.0.0.1", port)
        with socket.create_connection(address, 10) as silent:
            assert silent.recv(10) == b""
        with socket.create_connection(address, 10) as slow:
            slow.sendall(b"GET /metrics HT")
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(10)
            reader.connect(address)
            reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = 0
            with contextlib.suppress(ConnectionError):
                while piece := reader.recv(64):  # until the server gives up
                    received += len(piece)
                    time.sleep(0.01)
            assert received < 1 << 20
        with socket.create_connection(address, 10) as idle:
            request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"
            idle.sendall(request)
            answer = b"".join(iter(lambda: idle.recv(1000), b""))
            assert answer.endswith(b"ok\n")


def test_what_is_no_request_gets_an_answer_that_says_so() -> None:
    cases = {
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (64 << 10) + b"\r\n\r\n": b"431",
        b"GET / HTTP/1.1\r\n\r\n": b"400",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n": b"400",
        b"\x00\xff\x00\r\n\r\n": b"400",
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n": b"405",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n": b"404",
        b"GET / HTTP/1.0\r\n\r\n": b"200",
        b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n": b"200",
    }
    with serving() as port:
        for request, status in cases.items():
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(request)
                answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                assert answer.split(b" ")[1] == status, request[:60]


def test_a_page_that_fails_is_an_error_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(live: bool) -> bytes:
        raise ValueError("broken page")

    with serving(page=broken) as port:
        assert timed_get(port, "/")[0] == 500
        assert timed_get(port, "/healthz")[0] == 200
    assert "broken page" in capfd.readouterr().err


def test_many_who_ask_share_one_page() -> None:
    made = 0

    def metrics() -> bytes:
        nonlocal made
        made += 1
        return b"m 1\n"

    begin = time.monotonic()
    with serving(metrics) as port:
        for _ in range(50):
            assert timed_get(port, "/metrics")[1] == b"m 1\n"
        assert made <= 1 + (time.monotonic() - begin) / 0.5


@pytest.mark.parametrize("path", ["/", "/live", "/state", "/metrics"])
def test_an_unknown_host_name_is_refused(path: str) -> None:
    with serving() as port:
        status, body, _ = timed_get(port, path, "rebound.evil.example:9464")
        assert status == 403
        assert b"rebound.evil.example" in body
        assert b"PLIMSOLL_ALLOWED_HOSTS" in body
        assert timed_get(port, path, f"127.0.0.1:{port}")[0] == 200
