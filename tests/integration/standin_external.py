"""Servers that stand in for vLLM, SGLang and an unknown engine: only for tests of the adapters.

Routes, methods and metric names are those that the engines document. ``--leak-mib-s`` touches
memory for good while the file ``--sick`` exists. SIGTERM ends the server as it ends uvicorn, and
removes that file, so that the next process is well. Calls that do something are lines of ``--log``;
that of SIGTERM says whether ``--gate`` was there. ``--helpers`` are processes beside the main one,
which nothing ends but a signal of their own, as vLLM's and SGLang's, and each ``--title`` is one
more that has it; the main one listens once ``--hold`` is gone. The first ``--busy`` questions for
its version are errors, and ``--requests-s`` are answered in each second. ``--cache-mib`` is what a
trim gives back. With ``--outstays`` SIGTERM ends
the titled processes alone, as vLLM's server does while it has open streams. A ``--worker`` of a
multi-node engine listens nowhere. With ``--transfers`` it completes prompts, as an engine that
exchanges KV blocks with others. There is no metrics page while the file ``--no-page`` exists.
With ``--api-key`` only that page and OPTIONS are free, as in SGLang.
"""

import argparse
import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VLLM = {
    "/health": "GET",
    "/version": "GET",
    "/v1/models": "GET",
    "/metrics": "GET",
    "/v1/completions": "POST",
}
DEV = {"/reset_prefix_cache": "POST", "/reset_mm_cache": "POST", "/sleep": "POST"}
PAUSE = {"/pause": "POST", "/resume": "POST", "/is_paused": "GET"}
SGLANG = {
    "/v1/models": "GET",
    "/metrics": "GET",
    "/server_info": "GET",
    "/flush_cache": "POST",
    "/pause_generation": "POST",
    "/continue_generation": "POST",
    "/release_memory_occupation": "POST",
}
COMPLETION = {"choices": [{"finish_reason": "length"}]}
TRANSFERS = {
    "/v1/models": {"data": [{"id": "m"}]},
    "/v1/completions": COMPLETION | {"kv_transfer_params": {"at": 1}},
}
ROUTES = {
    "vllm": VLLM,
    "vllm-pause": VLLM | PAUSE,
    "vllm-dev": VLLM | PAUSE | DEV,
    "sglang": SGLANG,
    "sglang-old": {name.replace("/server", "/get_server"): SGLANG[name] for name in SGLANG},
    "custom": {},
}


class Engine:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.kind, self.log = arguments.kind, Path(arguments.log)
        self.running, self.busy, self.asked = arguments.running, arguments.busy, 0
        self.registries, self.pages = arguments.registries, 0
        self.has_key = bool(arguments.api_key)
        self.version, self.transfers = arguments.version, arguments.transfers
        self.cache = b"\1" * (arguments.cache_mib << 20)
        self.no_page, self.no_queue = arguments.no_page, arguments.no_queue
        self.sick, self.requests_s = Path(arguments.sick), arguments.requests_s
        self.began, self.paused_at = time.monotonic(), 0.0
        self.completed = 0
        self.held: list[bytearray] = []
        if arguments.leak_mib_s:
            threading.Thread(target=self.leak, args=(arguments.leak_mib_s,), daemon=True).start()

    def leak(self, rate: float) -> None:
        while True:
            if self.sick.exists():
                self.held.append(bytearray(b"\1" * int(rate * (1 << 20) / 10)))
            time.sleep(0.1)

    def served(self, label: str) -> str:
        if not self.requests_s and not self.completed:
            return ""
        count = (time.monotonic() - self.began) * self.requests_s + self.completed
        return f"vllm:request_success_total{label} {count:.0f}.0\n"

    def note(self, line: str) -> None:
        with self.log.open("a") as out:
            out.write(f"{os.getpid()} {line}\n")

    def metrics(self) -> str:
        steps = int(((self.paused_at or time.monotonic()) - self.began) * 50)
        self.pages += 1
        steps += self.pages % self.registries * 100_000  # each counts for itself
        if self.kind.startswith("vllm"):
            label = '{engine="0",model_name="m"}'
            queue = "" if self.no_queue else f"vllm:num_requests_waiting{label} 0.0\n"
            return (
                f"# TYPE vllm:num_requests_running gauge\n"
                f"vllm:num_requests_running{label} {self.running}.0\n"
                f"{queue}"
                f"vllm:kv_cache_usage_perc{label} {self.running / 4}\n"
                f"vllm:generation_tokens_total{label} {steps}.0\n"
                f"vllm:generation_tokens_created{label} 1.7e+09\n"
                f"vllm:iteration_tokens_total_count{label} {steps}.0\n" + self.served(label)
            )
        label = '{model_name="m"}'
        return (
            f"sglang:num_running_reqs{label} {self.running}.0\n"
            f"sglang:num_queue_reqs{label} 0.0\n"
            f"sglang:token_usage{label} {self.running / 4}\n"
        )


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, text: str = "") -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def any_method(self) -> None:
            path = self.path.partition("?")[0]
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            method = ROUTES[engine.kind].get(path)
            engine.completed += path == "/v1/completions"
            if engine.transfers and path in TRANSFERS:
                self.answer(200, json.dumps(TRANSFERS[path]))
            elif engine.has_key and self.command != "OPTIONS" and path != "/metrics":
                self.answer(401)
            elif method is None:
                self.answer(404)
            elif method != self.command:
                self.answer(405)
            elif path == "/v1/completions":
                self.answer(200, json.dumps(COMPLETION))
            elif path == "/metrics":
                found = not engine.no_page.exists()
                self.answer(200 if found else 503, engine.metrics() if found else "")
            elif path.endswith(("/version", "/server_info", "/get_server_info")):
                # SGLang's comes from its scheduler, which may be busy: here it is at first.
                engine.asked += 1
                busy = engine.asked <= engine.busy
                text = json.dumps({"version": engine.version, "internal_states": [{}]})
                self.answer(500 if busy else 200, text)
            elif path == "/is_paused":
                engine.note(self.path)
                self.answer(200, json.dumps({"is_paused": bool(engine.paused_at)}))
            else:
                if method == "POST":
                    engine.note(self.path)
                    engine.cache = b""
                    engine.paused_at = time.monotonic() if path == "/pause" else 0.0
                self.answer(200, "{}")

        do_GET = do_POST = do_OPTIONS = any_method

        def log_message(self, format: str, *args: object) -> None:
            return

    return Handler


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--kind", choices=list(ROUTES), required=True)
    parse.add_argument("--host", default="127.0.0.1")
    parse.add_argument("--port", type=int, required=True)
    parse.add_argument("--log", required=True)
    parse.add_argument("--sick", default="/nonexistent")
    parse.add_argument("--gate", type=Path, default=Path("/nonexistent"))
    parse.add_argument("--no-page", type=Path, default=Path("/nonexistent"))
    parse.add_argument("--leak-mib-s", type=float, default=0.0)
    parse.add_argument("--running", type=int, default=0)
    parse.add_argument("--no-queue", action="store_true")
    parse.add_argument("--requests-s", type=float, default=0.0)
    parse.add_argument("--helpers", type=int, default=0)
    parse.add_argument("--registries", type=int, default=1, help="pages of so many in turn")
    parse.add_argument("--cache-mib", type=int, default=0)
    parse.add_argument("--busy", type=int, default=0)
    parse.add_argument("--title", action="append", default=[])
    parse.add_argument("--outstays", action="store_true")
    parse.add_argument("--worker", action="store_true")
    parse.add_argument("--transfers", action="store_true")
    parse.add_argument("--api-key")
    parse.add_argument("--version", default="0.5.23")
    parse.add_argument("--hold", type=Path, default=Path("/nonexistent"))
    arguments, _ = parse.parse_known_args()
    started = []
    for title in ["sleep"] * arguments.helpers + arguments.title:
        if (child := os.fork()) == 0:
            # vLLM's write their titles over their environment: nothing in it tells whose they are.
            os.execve("/bin/sleep", [title, "600"], {})
        started.append(child)
    while arguments.hold.exists():
        time.sleep(0.02)
    engine = Engine(arguments)

    def terminate(number: int, frame: object) -> None:
        gated = arguments.gate.exists()
        engine.note("SIGTERM unready" if gated else "SIGTERM")
        engine.sick.unlink(missing_ok=True)
        if not arguments.outstays:
            os._exit(0)
        for part in started[arguments.helpers :]:
            os.kill(part, signal.SIGKILL)
            os.waitpid(part, 0)

    signal.signal(signal.SIGTERM, terminate)
    if arguments.worker:
        print("serving", flush=True)
    while arguments.worker:
        signal.pause()
    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer.daemon_threads = True
    if ":" in arguments.host:
        ThreadingHTTPServer.address_family = socket.AF_INET6
    server = ThreadingHTTPServer((arguments.host, arguments.port), handler(engine))
    print("serving", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
