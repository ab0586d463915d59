"""A plain Python "engine": an HTTP server that answers 200, and one mechanism of mechanisms.py.

    python -m leaklab.plain_engine --port 8000 --mechanism mappings --rate-mib-s 4

With ``--once FILE`` a leak is in the first process alone: the file is made by it, and a process
that finds it is well. So a restart shows whether it cured.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from leaklab.mechanisms import HEALTHY, LEAKS, MIB, Tick, idle, leaking

TICK_S = 0.25
BALLAST = 48 * MIB
"""What an engine has from its start, weights for example."""
PIECE = {"helpers_left": 2 * MIB}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


def mechanism(name: str, rate: float, once: Path | None) -> Tick:
    if name in HEALTHY:
        return HEALTHY[name]()
    if once is not None:
        if once.exists():
            return idle()
        once.touch()
    return leaking(LEAKS[name](), rate, PIECE.get(name, MIB // 4))


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--port", type=int, required=True)
    parse.add_argument("--mechanism", choices=[*LEAKS, *HEALTHY], required=True)
    parse.add_argument("--rate-mib-s", type=float, default=4.0)
    parse.add_argument("--speed", type=float, default=1.0, help="of the mechanism's clock")
    parse.add_argument("--once", type=Path)
    arguments = parse.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    ballast = bytearray(b"\1") * BALLAST
    # Before the server's thread begins: some fork.
    tick = mechanism(arguments.mechanism, arguments.rate_mib_s * MIB, arguments.once)
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    began = time.monotonic()
    while ballast:
        tick(arguments.speed * (time.monotonic() - began))
        time.sleep(TICK_S)


if __name__ == "__main__":
    main()
