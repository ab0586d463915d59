"""Real hours of healthy, noisy processes under real supervisors that may restart them.

    python -m bench.leaklab_hours --minutes 45

Each process of ``leaklab`` (the plain engine with each of its healthy mechanisms, and two of
our engines on the CPU, one nearly idle and one with bursts of streams) runs beside its own
supervisor in mode ``Recover``. Writes what the supervisors opened, confirmed and did to
``leaklab-hours.json``, and the memory that they saw, thinned out, to ``leaklab/noise.json``: noise
of real processes for whoever generates series.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.result import publish
from leaklab import replicas
from leaklab.mechanisms import HEALTHY
from leaklab.play import disruptions
from leaklab.recorded import RECORDINGS
from leaklab.replicas import Policy
from plimsoll_api.state import View
from plimsoll_cli.local import model, runner
from plimsoll_cli.local.plan import Plan

BUDGET_MIB = 256
POLICY = Policy(growth_mib=BUDGET_MIB, warmup="30s", stall="30s", interval_s=1.0)
SAMPLE_S = 5.0
HERTZ = os.sysconf("SC_CLK_TCK")
ABOUT = (
    "Memory of real processes that leak nothing, as their supervisors saw it: one series a process,"
    " a row each 5 s. t: seconds since the supervisor's start; then KiB of each segment named in"
    " columns (the sum is the host memory that is judged), null where unknown."
)

_view = msgspec.json.Decoder(View)


@dataclass
class Watched:
    """One process and what is seen of it."""

    family: str
    plan: Plan
    rows: list[dict[str, int]] = field(default_factory=list)
    seconds: float = 0.0
    starts: int = 0
    cpu_s: float = 0.0

    async def run(self, until: float) -> None:
        """Until ``until`` (monotonic)."""
        troubles: list[str] = []
        async with runner.run_replica(self.plan, troubles.append) as replica:
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                load = group.create_task(self._load(until))
                async with httpx.AsyncClient(timeout=3.0, trust_env=False) as client:
                    while time.monotonic() < until:
                        await self._look(client)
                        await asyncio.sleep(SAMPLE_S)
                load.cancel()
            self.seconds = time.monotonic() - began
            self.starts = replica.engine.starts
            self.cpu_s = sum(
                cpu_s(pid) for c in (replica.engine, replica.supervisor) if (pid := c.pid)
            )

    async def _look(self, client: httpx.AsyncClient) -> None:
        with contextlib.suppress(httpx.HTTPError, msgspec.MsgspecError):
            answer = await client.get(f"{self.plan.supervisor_url}/state")
            seen = _view.decode(answer.raise_for_status().content).assessment
            row = {segment.value: size // 1024 for segment, size in seen.segments.items()}
            self.rows.append({"t": round(seen.t), **row})

    async def _load(self, until: float) -> None:
        """Requests to our engine: one now and then, or many at once in a quarter of the time."""
        if not self.family.startswith("engine"):
            return
        body = {"model": "tiny", "prompt": "the water line", "max_tokens": 24, "ignore_eos": True}
        async with httpx.AsyncClient(
            base_url=self.plan.serving_url, timeout=60.0, trust_env=False
        ) as client:
            turn = 0
            while time.monotonic() < until:
                turn += 1
                count = 12 if self.family == "engine_bursts" else 1
                body["prompt"] = f"the water line {turn}"
                await asyncio.gather(
                    *(client.post("/v1/completions", json=body) for _ in range(count)),
                    return_exceptions=True,
                )
                await asyncio.sleep(10.0 if turn % 6 else 40.0)

    def told(self) -> dict[str, Any]:
        found = replicas.journal(self.plan)
        return {
            "family": self.family,
            "hours": round(self.seconds / 3600, 4),
            "incidents": len(found),
            "confirmed": sum(incident.confirmed_at is not None for incident in found),
            "actions": sum(len(disruptions(incident)) for incident in found),
            "engine_starts": self.starts,
            "cpu_s": round(self.cpu_s, 1),
            "what": [
                {
                    "kind": one.kind.value,
                    "segment": one.attribution.segment,
                    "confirmed": one.confirmed_at is not None,
                    "consumed_ratio": round(one.consumed_ratio, 3),
                    "phase": one.phase.value,
                    "reason": one.reason.value if one.reason else None,
                    "steps": [f"{step.step} {step.outcome.value}" for step in one.timeline],
                }
                for one in found
            ],
        }


def cpu_s(pid: int) -> float:
    """Processor time of a process and of its living and ended children, seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = {int(c) for task in tasks for c in (task / "children").read_text().split()}
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / HERTZ + sum(cpu_s(child) for child in children)


async def observe(minutes: float, root: Path) -> list[Watched]:
    tiny = root / "tiny"
    await model.generate_tiny_checkpoint(tiny)
    environ = dict(os.environ)
    watched = [
        Watched(family, replicas.plain(f"h{n}", root / f"h{n}", POLICY, environ, family))
        for n, family in enumerate(HEALTHY)
    ]
    for name in ("engine_quiet", "engine_bursts"):
        folder = root / name
        made = replicas.engine(name.replace("_", "-"), folder, tiny, POLICY, environ)
        watched.append(Watched(name, made))
    until = time.monotonic() + 60 * minutes
    async with asyncio.TaskGroup() as group:
        for one in watched:
            group.create_task(one.run(until))
            await asyncio.sleep(2.0)  # not all starts at once
    return watched


def noise(watched: list[Watched]) -> dict[str, Any]:
    series = {}
    for one in watched:
        columns = sorted({key for row in one.rows for key in row if key != "t"})
        rows = [[row["t"], *(row.get(key) for key in columns)] for row in one.rows]
        series[one.family] = {"columns": ["t", *columns], "rows": rows}
    return {"about": ABOUT, "series": series}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=45.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leaklab-") as folder:
        watched = asyncio.run(observe(arguments.minutes, Path(folder)))
        told = [one.told() for one in watched]
    text = json.dumps(noise(watched), separators=(",", ":"))
    RECORDINGS.write_text(text + "\n")
    seconds = sum(one.seconds for one in watched)
    figures = {
        "processes_count": len(watched),
        "replica_hours": seconds / 3600,
        "incidents_count": sum(one["incidents"] for one in told),
        "confirmed_count": sum(one["confirmed"] for one in told),
        "false_actions_count": sum(one["actions"] for one in told),
        "engine_restarts_count": sum(one["engine_starts"] - 1 for one in told),
        "cpu_core_ratio": len(watched) * sum(one.cpu_s for one in watched) / seconds,
        "budget_mib": BUDGET_MIB,
    }
    publish("leaklab-hours", figures, told)


if __name__ == "__main__":
    main()
