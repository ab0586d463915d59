"""The leaky service on stage: clients stream, the supervisor works, everything is noted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from plimsoll_api.incident_record import JOURNAL_FILE
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_cli import incidents, stopping
from plimsoll_cli.demo.evidence import DeviceBytes, Observed, Odds, Times, cured, memory_of
from plimsoll_cli.demo.streams import Clients, now
from plimsoll_cli.local import runner, traces
from plimsoll_cli.local.command import screens
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import Command, Plan
from plimsoll_cli.local.status import Poller
from plimsoll_cli.local.view import LiveView, Screen

IDLE_S = 4.0
"""Idle time that is measured before and after the traffic: several samples."""
SETTLE_S = 8.0
"""Streaming goes on for this long after the incident was resolved."""
WATCH_S = 0.25
STOP_S = 10.0


class Scene:
    """One performance. ``troubles`` says what went wrong beside the figures."""

    def __init__(
        self, service: InferenceService, plan: Plan, texts: Sequence[str], streams: int
    ) -> None:
        self.troubles: list[str] = []
        self._plan, self._count = plan, streams
        self._clients = Clients(plan.serving_url, service.served_name, streams, texts)
        self._poller = Poller(plan)
        self._times = Times(0.0, 0.0, 0.0, 0.0)
        self._device = DeviceBytes()
        self._odds: list[Odds] = []
        self._note = ""

    async def play(
        self, trace: Path, deadline: float, console: Console | None, say: runner.Say
    ) -> Observed:
        """Run the leaky service until some seconds after an incident was resolved, and observe it.

        At ``deadline`` (loop time) it ends without an error: the figures say what is missing.
        """

        def ended(line: str) -> None:
            self.troubles.append(line)
            say(line)

        recorder = _recorder(self._plan, trace, ended)
        async with runner.running(self._plan, ended):
            recorder.start()
            background = [self._poller.run(), self._note_odds()]
            if console is not None and console.is_terminal:
                background.append(LiveView(console, self._screens()).run())
            try:
                async with stopping.background(*background):
                    await self._act(deadline)
            finally:
                await recorder.stop(STOP_S)
        started_at, samples = traces.read(trace)
        return Observed(
            incidents=incidents.read(self._plan.state_dir / JOURNAL_FILE),
            memory=memory_of(samples, started_at),
            replies=self._clients.replies,
            texts_different=self._clients.different(),
            streams=self._count,
            times=self._times,
            device=self._device,
            odds=self._odds,
        )

    async def _act(self, deadline: float) -> None:
        self._note = "idle: measuring the baseline"
        begin = now()
        await asyncio.sleep(IDLE_S)
        before = _allocated(self._poller)
        traffic = now()
        self._note = "streaming"
        streaming = asyncio.create_task(self._clients.run())
        try:
            await self._watch(deadline)
            self._clients.finish()
            await streaming
        finally:
            streaming.cancel()
        self._note = "idle again"
        quiet = now()
        await asyncio.sleep(2 * IDLE_S)
        # The first half is for the last requests' memory to go, and for a report that shows it.
        self._times = Times(begin, traffic, quiet + IDLE_S, now())
        self._device = DeviceBytes(before, _allocated(self._poller))

    async def _note_odds(self) -> None:
        """Note what the supervisor says of each sample. Until it is cancelled."""
        while True:
            view = self._poller.snapshot.view
            if view is not None and (not self._odds or view.time > self._odds[-1].at):
                growth = [
                    one.confidence
                    for one in view.assessment.suspicions
                    if one.kind is IncidentKind.HOST_GROWTH
                ]
                self._odds.append(Odds(view.time, max(growth, default=0.0)))
            await asyncio.sleep(WATCH_S)

    async def _watch(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            view = self._poller.snapshot.view
            ended = [incident for incident in view.recent if incident.ended] if view else []
            if cured(ended) is not None:
                self._note = "resolved: streaming for a few more seconds"
                await asyncio.sleep(SETTLE_S)
                return
            await asyncio.sleep(WATCH_S)
        self.troubles.append("the time ended before an incident was resolved")

    def _screens(self) -> Callable[[], Screen]:
        base, clients = screens(self._plan, self._poller), self._clients
        return lambda: replace(base(), traffic=clients.traffic(), note=self._note)


def _recorder(plan: Plan, file: Path, on_exit: Callable[[str], None]) -> Container:
    """Return the supervisor's own recorder, as one more process beside engine and supervisor."""
    program = (sys.executable, "-m", "plimsoll_cli.main", "record")
    argv = (*program, str(file.absolute()), f"--run-dir={plan.root}")
    return Container(
        Command("recorder", argv, plan.supervisor.env, plan.root / "recorder.log"), on_exit
    )


def _allocated(poller: Poller) -> int | None:
    """Return what torch has allocated on all devices; None on a CPU or if one is unknown."""
    status = poller.snapshot.status
    sizes = [device.torch_allocated for device in status.devices] if status else []
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None
