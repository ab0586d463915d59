"""A proxy in front of an API server that answers badly at times, by a seeded generator.

It speaks plain HTTP on loopback, so that a client needs only another ``server`` in its kubeconfig.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

HOP = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
HANG_S = 3.0
RARE, WATCH_LIFE_S = 0.12, (0.2, 4.0)


EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}


@contextlib.contextmanager
def proxied(kubeconfig: Path, seed: int) -> Iterator[tuple[FaultyProxy, Path]]:
    """A proxy before the server of ``kubeconfig``, and a kubeconfig that leads through it."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    ca = kubeconfig.with_name(f"ca-{seed}.crt")
    ca.write_bytes(base64.b64decode(cluster.pop("certificate-authority-data")))
    with FaultyProxy(cluster["server"], str(ca), seed) as proxy:
        cluster["server"] = f"http://127.0.0.1:{proxy.port}"
        through = kubeconfig.with_name(f"proxied-{seed}")
        through.write_text(yaml.safe_dump(config))
        yield proxy, through


class FaultyProxy:
    """``faulty`` turns the faults on and off; ``injected`` counts them by name. While ``expired``
    is set every watch ends as the API server ends one that begins too far back. Each answer that is
    no watch comes ``delay_s`` late."""

    def __init__(self, server: str, ca_file: str, seed: int) -> None:
        self._server = server
        self._tls = ssl.create_default_context(cafile=ca_file)
        self._random = random.Random(seed)
        self._stale: dict[str, tuple[int, bytes]] = {}
        self.faulty = False
        self.expired = False
        self.delay_s = 0.0
        self.injected: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            app = web.Application(client_max_size=1 << 24)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()
            late = asyncio.all_tasks() - {asyncio.current_task()}
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        await asyncio.sleep(self.delay_s)
        fault = self._fault(request)
        if fault:
            self.injected[fault] += 1
        if fault == "timeout":
            await asyncio.sleep(HANG_S)
            return _status(504, "Timeout", {})
        if fault in ("429", "409", "500", "503"):
            return _status(int(fault), f"injected {fault}", {"Retry-After": "1"})
        if fault == "stale":
            status, data = self._stale[request.path_qs]
            return web.Response(status=status, body=data, content_type="application/json")
        async with self._forward(request) as answer:
            data = await answer.read()
            if request.method == "GET" and answer.status == 200:
                self._stale[request.path_qs] = (answer.status, data)
            if fault == "lost":  # it was done, and nobody hears of it
                return _status(500, "the answer was lost", {})
            headers = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            return web.Response(status=answer.status, body=data, headers=headers)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        async with self._forward(request) as answer:
            out = web.StreamResponse(status=answer.status)
            out.content_type = "application/json"
            await out.prepare(request)
            life = self._random.uniform(*WATCH_LIFE_S)
            try:
                while True:
                    if self.expired:
                        self.injected["watch expired"] += 1
                        await out.write(json.dumps(EXPIRED).encode() + b"\n")
                        break
                    patience = life if self.faulty else 1.0
                    try:
                        async with asyncio.timeout(patience):
                            chunk = await answer.content.readany()
                    except TimeoutError:
                        if self.faulty:
                            self.injected["watch dropped"] += 1
                            break
                        continue
                    if not chunk:
                        break
                    await out.write(chunk)
            except (ConnectionError, aiohttp.ClientError):
                return out
            return out

    def _forward(self, request: web.Request) -> Any:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        body = request.content if request.can_read_body else None
        return self._session.request(
            request.method, self._server + request.path_qs, headers=headers, data=body
        )

    def _fault(self, request: web.Request) -> str | None:
        if not self.faulty or self._random.random() > RARE:
            return None
        kinds = ["429", "500", "503", "timeout", "lost"]
        if request.method != "GET":  # no API server answers a read with a conflict
            kinds.append("409")
        if request.method == "GET" and request.path_qs in self._stale:
            kinds.append("stale")
        return self._random.choice(kinds)


def _status(code: int, message: str, headers: dict[str, str]) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    reasons = {429: "TooManyRequests", 409: "Conflict", 504: "Timeout"}
    body |= {"message": message, "reason": reasons.get(code, "InternalError")}
    return web.json_response(body, status=code, headers=headers)
