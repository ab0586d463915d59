"""Twenty thousand short requests over HTTP, a fifth of whose clients leave: nothing is left of
them. ``research/bench/soak.py`` is the million without HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import soundfile
from PIL import Image

MODEL = "tiny"
REQUESTS, BLOCK, CLIENTS = 20_000, 1_000, 24
WARM_UP = 5
"""Blocks in which caches fill."""
FILES = 48
MOST_BYTES_PER_REQUEST = 200.0
"""Of a request that is lost the tokens alone are more. (The slope's noise is a tenth of it.)"""


@pytest.fixture
def engines(engine: Any, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """One that sees and one that hears, each with caches that the files do not fit into."""
    command = [sys.executable, "-m", "plimsoll_faults.models.tiny_media", "all", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    flags = ("--max-queued", "64", "--max-model-len", "96", "--media-cache-mib", "1")
    kinds = ("llava", "whisper")
    started = [type(engine)(tmp_path / kind, tmp_path / f"run-{kind}", *flags) for kind in kinds]
    try:
        for one in started:
            one.wait_ready()
        yield started[0], started[1]
    finally:
        for one in started:
            one.end()


class Clients:
    def __init__(self, session: aiohttp.ClientSession, sees: str, hears: str) -> None:
        self.session = session
        self.sees, self.hears = f"{sees}/v1", f"{hears}/v1"
        self.rng = random.Random(7)
        self.done: Counter[str] = Counter()
        self.images = [image(number) for number in range(FILES)]
        self.sounds = [sound(number) for number in range(FILES)]

    async def run(self, count: int) -> None:
        left = iter(range(count))
        await asyncio.gather(*(self._client(left) for _ in range(CLIENTS)))

    async def _client(self, left: Iterator[int]) -> None:
        for _ in left:
            (kind,) = self.rng.choices(("text", "image", "audio"), (0.7, 0.2, 0.1))
            leaves = self.rng.random() < 0.2
            # The engine says nothing while a client leaves, so each leaves at a time of its own.
            patience_s = self.rng.random() * 0.1 if leaves else 60.0
            with contextlib.suppress(TimeoutError) if leaves else contextlib.nullcontext():
                async with asyncio.timeout(patience_s):
                    await self._ask(kind)
            self.done[kind] += 1
            self.done["impatient"] += leaves

    async def _ask(self, kind: str) -> None:
        if kind == "audio":
            form = aiohttp.FormData()
            form.add_field("file", self.rng.choice(self.sounds), filename="sound.wav")
            form.add_field("model", MODEL)
            await self._post(f"{self.hears}/audio/transcriptions", data=form)
            return
        how = {
            "model": MODEL,
            "max_tokens": self.rng.randint(1, 4),
            "temperature": self.rng.choice((0, 1)),
            "stream": self.rng.random() < 0.5,
        }
        if kind == "text":
            prompt = [self.rng.randrange(3, 500) for _ in range(self.rng.randint(1, 24))]
            await self._post(f"{self.sees}/completions", json={**how, "prompt": prompt})
            return
        part = {"type": "image_url", "image_url": {"url": self.rng.choice(self.images)}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "Who?"}]}]
        await self._post(f"{self.sees}/chat/completions", json={**how, "messages": messages})

    async def _post(self, url: str, **body: Any) -> None:
        async with self.session.post(url, **body) as answer:
            content = await answer.read()
            assert answer.status == 200, content


def image(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def sound(seed: int) -> bytes:
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, 4_000)
    file = io.BytesIO()
    soundfile.write(file, noise.astype(np.float32), 16_000, format="WAV")
    return file.getvalue()


def in_use(engines: tuple[Any, Any]) -> int:
    """Malloc in use and Python objects of both frontends and both workers."""
    found = 0
    for engine in engines:
        for process in engine.status()["processes"]:
            if process["role"] in ("frontend", "worker"):
                found += process["malloc_in_use"] + process["python_objects"]
    return found


def reported(engine: Any) -> None:
    """Returns once the worker has measured itself after this call."""
    begun = time.monotonic()
    engine.until(
        lambda: (engine.status()["report_age_s"] or math.inf) < time.monotonic() - begun, "a report"
    )


def collected(engines: tuple[Any, Any]) -> int:
    processes = [one for engine in engines for one in engine.status()["processes"]]
    return sum(one.get("full_collected") or 0 for one in processes)


async def soak(engines: tuple[Any, Any]) -> tuple[Counter[str], list[int]]:
    """What was asked, and the memory after each block, idle."""
    sizes = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = Clients(session, engines[0].url, engines[1].url)
        for _ in range(REQUESTS // BLOCK):
            await clients.run(BLOCK)
            for engine in engines:
                await asyncio.to_thread(engine.clean)
                await asyncio.to_thread(reported, engine)
            sizes.append(await asyncio.to_thread(in_use, engines))
    return clients.done, sizes


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_thousand_requests_over_http(engines: tuple[Any, Any]) -> None:
    done, sizes = asyncio.run(soak(engines))
    assert sum(done[kind] for kind in ("text", "image", "audio")) == REQUESTS
    assert done["impatient"] > REQUESTS * 0.18
    steady = sizes[WARM_UP:]
    from scipy.stats import theilslopes  # a second, in every worker that collects tests

    slope, _, low, high = theilslopes(steady, [BLOCK * index for index in range(len(steady))])
    assert slope < MOST_BYTES_PER_REQUEST, (low, slope, high, sizes)
    assert collected(engines) == 0
