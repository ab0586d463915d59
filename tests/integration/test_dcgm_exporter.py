"""Device memory from the page of a DCGM exporter, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from plimsoll_api.supervision import EXPORTER_PORT, NODE_IP
from plimsoll_sidecar.signals.dcgm import SCRAPE_S, Dcgm
from plimsoll_sidecar.signals.device import DeviceBytes

MIB = 1 << 20


def line(name: str, uuid: str, value: str, more: str = "") -> str:
    labels = f'gpu="0",UUID="{uuid}",pci_bus_id="00000000:00:04.0",device="nvidia0"{more}'
    return f'DCGM_FI_DEV_FB_{name}{{{labels},modelName="NVIDIA H200",pod=""}} {value}\n'


PAGE = (
    "# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).\n"
    "# TYPE DCGM_FI_DEV_FB_USED gauge\n"
    + line("USED", "GPU-a", "1000")
    + line("FREE", "GPU-a", "2000")
    + line("RESERVED", "GPU-a", "600")
    + line("USED", "GPU-b", "7")
    + line("FREE", "GPU-b", "3")
    + line("USED", "GPU-c", "7")
)


@contextmanager
def exporter(pages: list[tuple[int, str]]) -> Iterator[int]:
    """Answers with one page after another, the last one again and again."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, page = pages.pop(0) if len(pages) > 1 else pages[0]
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def test_a_device_is_found_by_its_uuid() -> None:
    with exporter([(200, PAGE)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}")
        assert dcgm.memory("GPU-a") == DeviceBytes(1000 * MIB, 3600 * MIB)
        assert dcgm.memory("GPU-b") == DeviceBytes(7 * MIB, 10 * MIB)
        assert dcgm.memory("GPU-c") is None, "without what is free its size is unknown"
        assert dcgm.memory("GPU-x") is None
        assert dcgm.memory("MIG-a") is None


def test_a_page_is_read_once_in_a_while_and_a_failed_one_is_unknown() -> None:
    times = iter((0.0, SCRAPE_S / 2, SCRAPE_S, 2 * SCRAPE_S, 3 * SCRAPE_S))
    later = PAGE.replace("1000", "1500")
    with exporter([(200, PAGE), (500, ""), (200, later)]) as port:
        dcgm = Dcgm(f"http://127.0.0.1:{port}", clock=lambda: next(times))
        found = [dcgm.memory("GPU-a") for _ in range(4)]
    assert [memory and memory.used // MIB for memory in found] == [1000, 1000, None, 1500]
    assert dcgm.memory("GPU-a") is None, "nobody listens any more"


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("10.0.0.7", "9400", "http://10.0.0.7:9400"),
        ("fd00::7", "9400", "http://[fd00::7]:9400"),
        ("10.0.0.7", "", None),
        ("", "9400", None),
    ],
)
def test_the_environment_names_the_nodes_exporter(
    monkeypatch: pytest.MonkeyPatch, host: str, port: str, url: str | None
) -> None:
    monkeypatch.setenv(NODE_IP, host)
    monkeypatch.setenv(EXPORTER_PORT, port)
    found = Dcgm.of_node()
    assert (found._server._url if found else None) == url
