"""Connections that are opened and left, or used slowly, or in ways that no client would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

from bench.abuse_scene import HOST, Class, Played, Scene, read, request

LONG = {"prompt": "Tide " * 20, "max_tokens": 400, "stream": True, "ignore_eos": True}


@contextlib.asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Any]]:
    """As many of ``count`` as the server takes."""
    opened = await asyncio.gather(
        *(asyncio.wait_for(asyncio.open_connection(HOST, port), 10) for _ in range(count)),
        return_exceptions=True,
    )
    pairs = [one for one in opened if not isinstance(one, BaseException)]
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.transport.abort()


async def trickle(port: int, count: int, hold_s: float, sent: bytes = b"") -> Played:
    """``count`` connections that say ``sent``, then a byte a second, for ``hold_s`` seconds."""
    async with connections(port, count) as pairs:
        for _, writer in pairs:
            writer.write(sent)
        for _ in range(int(hold_s)):
            await asyncio.sleep(1.0)
            if sent:
                for _, writer in pairs:
                    writer.write(b"X")
        return Played(attempts=count, figures={"opened_count": len(pairs)})


async def idle_connections(scene: Scene) -> Played:
    return await trickle(scene.port, scene.many(2000), scene.hold_s(30))


async def slow_headers(scene: Scene) -> Played:
    return await trickle(
        scene.port, scene.many(300), scene.hold_s(30), b"GET /health HTTP/1.1\r\nA:"
    )


async def silent_probes(scene: Scene) -> Played:
    """The supervisor's probe port: the kubelet asks there, too, and waits for a second."""
    return await trickle(scene.probe_port, scene.many(120, 12), max(4.0, scene.hold_s(20)))


async def slow_scrapes(scene: Scene) -> Played:
    sent = b"GET /metrics HTTP/1.1\r\nA:"
    return await trickle(scene.metrics_port, scene.many(900), scene.hold_s(20), sent)


async def slow_readers(scene: Scene) -> Played:
    """Streams that nobody reads."""
    count = scene.many(40)
    content = json.dumps({"model": scene.model, **LONG}).encode()
    async with connections(scene.port, count) as pairs:
        for reader, writer in pairs:
            reader._limit = 1  # the transport stops reading at twice this
            writer.write(request(scene, "/v1/completions", content))
        await asyncio.sleep(scene.hold_s(20))
    return Played(attempts=count)


async def disconnects(scene: Scene) -> Played:
    """Clients that leave at any point of a request; then every ledger is looked at."""
    count, rng = scene.many(1000), random.Random(4)
    limit = asyncio.Semaphore(32)
    content = json.dumps({"model": scene.model, **LONG}).encode()
    sent = request(scene, "/v1/completions", content)

    async def leave() -> None:
        async with limit:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(HOST, scene.port)
                writer.write(sent if rng.random() < 0.7 else sent[: rng.randrange(len(sent))])
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1 << rng.randrange(12)), rng.random() / 5)
                writer.transport.abort()

    await asyncio.gather(*(leave() for _ in range(count)))
    findings = await asyncio.to_thread(_audit, scene)
    return Played(attempts=count, figures={"audit_findings_count": findings})


def _audit(scene: Scene) -> int:
    """Findings of the audit. Others' requests are under way, so that it cannot be idle."""
    request = urllib.request.Request(
        f"http://{HOST}:{scene.admin_port}/admin/v1/audit",
        headers={"Authorization": f"Bearer {scene.admin_token}"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return len(json.load(answer)["findings"])


async def smuggling(scene: Scene) -> Played:
    """Requests whose length two servers could read differently: a second answer is a defect."""
    hidden = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {scene.key}\r\n\r\n"
    chunk = f"0\r\n\r\n{hidden}"
    start = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {scene.key}\r\n"
    lengths = (
        f"Content-Length: {len(chunk)}\r\nTransfer-Encoding: chunked\r\n",
        f"Transfer-Encoding: chunked\r\nContent-Length: {len(chunk)}\r\n",
        f"Content-Length: 0\r\nContent-Length: {len(chunk)}\r\n",
        f"Content-Length: +{len(chunk)}\r\n",
        f"Content-Length: 0x{len(chunk):x}\r\n",
        "Content-Length: -1\r\n",
        f"Content-Length : {len(chunk)}\r\n",
        f"Transfer-Encoding: xchunked\r\nContent-Length: {len(chunk)}\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding:\tchunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: chunked\r\n A: b\r\n",
        f"Content-Length: {len(chunk)}, {len(chunk)}\r\n",
    )
    smuggled: list[str] = []
    for length in lengths:
        reader, writer = await asyncio.open_connection(HOST, scene.port)
        writer.write(f"{start}{length}\r\n{chunk}".encode())
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(3):
                first = await read(reader)
                # Chunked alone ends at the zero: what follows is a request of its own, in order.
                plain = "Content-Length" not in length and "identity" not in length
                second = await read(reader) if first.status else first
                if second.status == 200 and not plain:
                    smuggled.append(length)
        writer.close()
    return Played(len(lengths), figures={"smuggled_count": len(smuggled)}, notes=smuggled)


CLASSES: dict[str, Class] = {
    one.__name__: one
    for one in (
        idle_connections, slow_headers, slow_readers, silent_probes, slow_scrapes, disconnects,
        smuggling,
    )
}  # fmt: skip
