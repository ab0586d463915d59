"""The replica under abuse, as its node sees it: memory, epochs, incidents, the loop's blocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.abuse_scene import HOST, Scene
from leaklab import replicas
from plimsoll_api.admin import Epoch
from plimsoll_api.names import TOKEN_FILE
from plimsoll_cli.local.plan import Plan
from plimsoll_cli.local.runner import LocalReplica, run_replica

ABUSER, OTHER = "key-of-an-abuser", "key-of-the-others"
SAMPLE_S = 0.25
BACK_S = 180.0
"""Longest wait for an engine that was restarted."""
STEADY_LOOKS, STEADY_BYTES, STEADY_LIMIT_S = 8, 4 << 20, 60.0
"""Memory is steady when it differs by less over this many looks, ``SAMPLE_S`` apart."""
BLOCKS = re.compile(r'event_loop_block_max_seconds\{[^}]*clock="cpu"[^}]*\} (\S+)')


@dataclass
class Replica:
    plan: Plan
    local: LocalReplica
    peak_bytes: int = 0

    def scene(self, key: str, scale: float = 1.0) -> Scene:
        places = self.plan.layout
        return Scene(
            places.port, places.admin_port, places.metrics_port, places.probe_port, "tiny", key,
            (self.plan.run_dir / TOKEN_FILE).read_text().strip(), scale,
        )  # fmt: skip

    def anonymous_bytes(self) -> int:
        """Of all processes of both containers. A page that forks share counts once."""
        found = 0
        for container in (self.local.engine, self.local.supervisor):
            with contextlib.suppress(psutil.Error):
                top = psutil.Process(container.pid or 0)
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                        found += int(text.partition("Pss_Anon:")[2].split()[0]) << 10
        self.peak_bytes = max(self.peak_bytes, found)
        return found

    async def watch(self) -> None:
        """Keeps ``peak_bytes``, until it is cancelled."""
        while True:
            await asyncio.to_thread(self.anonymous_bytes)
            await asyncio.sleep(SAMPLE_S)

    async def steady(self) -> None:
        """Waits, bounded, until the processes neither come nor go nor grow.

        An engine serves before it has its size. In the half second after a restart the old worker's
        processes go, and each new one copies what it shared with the zygote: 480 MiB, then 560.
        """
        deadline = time.monotonic() + STEADY_LIMIT_S
        looks: list[int] = []
        while time.monotonic() < deadline:
            looks = [*looks, await asyncio.to_thread(self.anonymous_bytes)][-STEADY_LOOKS:]
            if len(looks) == STEADY_LOOKS and max(looks) - min(looks) < STEADY_BYTES:
                return
            await asyncio.sleep(SAMPLE_S)

    async def epoch(self) -> Epoch:
        """The epoch of an engine that serves; waits for it."""
        deadline = time.monotonic() + BACK_S
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError):
                status = await asyncio.to_thread(self._status)
                if status["state"] == "serving":
                    return Epoch.parse(str(status["epoch"]))
            if time.monotonic() > deadline:
                log = self.local.engine.read_log_tail()
                raise RuntimeError(f"no engine within {BACK_S:g} s:\n{log}")
            await asyncio.sleep(0.2)

    async def cached_bytes(self) -> int:
        """Host memory in the engine's caches, by its ledger."""
        status = await asyncio.to_thread(self._status)
        return sum(
            int(entry["bytes"])
            for entry in status["ledger"]
            if entry["kind"] == "host" and entry["owner"].endswith("_cache")
        )

    def _status(self) -> dict[str, Any]:
        scene = self.scene("")
        request = urllib.request.Request(
            f"http://{HOST}:{scene.admin_port}/admin/v1/status",
            headers={"Authorization": f"Bearer {scene.admin_token}"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found

    def incidents(self) -> list[str]:
        return [f"{one.kind} {one.phase} {one.reason}" for one in replicas.journal(self.plan)]

    async def longest_block_s(self) -> float | None:
        """By the engine's own metric, CPU time, of the last minute or two; None without it."""
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            page = (await client.get(f"{self.plan.serving_url}/metrics")).text
        values = [float(value) for value in BLOCKS.findall(page)]
        return max(values, default=None)


def restarts(before: Epoch, after: Epoch) -> int:
    """Workers and engines that were started between two epochs."""
    if after.boot_id != before.boot_id:
        return max(1, after.number)
    return after.number - before.number


@contextlib.asynccontextmanager
async def started(plan: Plan) -> AsyncIterator[Replica]:
    """The replica with two API keys: two tenants."""
    keys = plan.root / "keys"
    plan.root.mkdir(parents=True, exist_ok=True)
    keys.write_text(f"{ABUSER}\n{OTHER}\n")
    argv = (*plan.engine.argv, f"--api-key-file={keys}")
    plan = replace(plan, engine=replace(plan.engine, argv=argv))
    async with run_replica(plan, lambda line: None) as local:
        yield Replica(plan, local)
