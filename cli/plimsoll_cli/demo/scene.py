"""Run of the leaky service, with clients, a recorder and the live view."""

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
from plimsoll_cli.demo.evidence import (
    DeviceBytes,
    LeakProbability,
    Observations,
    PhaseTimes,
    find_cured,
    host_memory_samples,
)
from plimsoll_cli.demo.streams import StreamingClients, now
from plimsoll_cli.local import runner, traces
from plimsoll_cli.local.command import screen_factory
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import Command, Plan
from plimsoll_cli.local.status import Poller
from plimsoll_cli.local.view import LiveView, Screen

IDLE_S = 4.0
"""Seconds of measured idle time before and after the traffic: several samples."""
EXTRA_STREAMING_S = 8.0
"""Seconds of streaming after the incident was resolved."""
WATCH_S = 0.25
STOP_S = 10.0


class DemoRun:
    """Run of the demo. ``problems`` describe failures that no figure shows."""

    def __init__(
        self, service: InferenceService, plan: Plan, texts: Sequence[str], streams: int
    ) -> None:
        self.problems: list[str] = []
        self._plan, self._count = plan, streams
        self._clients = StreamingClients(plan.serving_url, service.served_name, streams, texts)
        self._poller = Poller(plan)
        self._times = PhaseTimes(0.0, 0.0, 0.0, 0.0)
        self._device = DeviceBytes()
        self._odds: list[LeakProbability] = []
        self._status = ""

    async def run(
        self, trace: Path, deadline: float, console: Console | None, say: runner.PrintLine
    ) -> Observations:
        """Run the leaky service until some seconds after an incident was resolved.

        At ``deadline`` (loop time) it ends without an error; the figures show what is missing.
        """

        def ended(line: str) -> None:
            self.problems.append(line)
            say(line)

        recorder = _recorder(self._plan, trace, ended)
        async with runner.running(self._plan, ended):
            recorder.start()
            background = [self._poller.run(), self._record_probabilities()]
            if console is not None and console.is_terminal:
                background.append(LiveView(console, self._screens()).run())
            try:
                async with stopping.background(*background):
                    await self._run_phases(deadline)
            finally:
                await recorder.stop(STOP_S)
        started_at, samples = traces.read(trace)
        return Observations(
            incidents=incidents.read(self._plan.state_dir / JOURNAL_FILE),
            memory=host_memory_samples(samples, started_at),
            replies=self._clients.replies,
            texts_different=self._clients.count_different(),
            streams=self._count,
            times=self._times,
            device=self._device,
            odds=self._odds,
        )

    async def _run_phases(self, deadline: float) -> None:
        self._status = "idle: measuring the baseline"
        begin = now()
        await asyncio.sleep(IDLE_S)
        before = _torch_allocated(self._poller)
        traffic = now()
        self._status = "streaming"
        streaming = asyncio.create_task(self._clients.run())
        try:
            await self._watch(deadline)
            self._clients.finish()
            await streaming
        finally:
            streaming.cancel()
        self._status = "idle again"
        quiet = now()
        await asyncio.sleep(2 * IDLE_S)
        # The first half lets the last requests' memory be freed and reported.
        self._times = PhaseTimes(begin, traffic, quiet + IDLE_S, now())
        self._device = DeviceBytes(before, _torch_allocated(self._poller))

    async def _record_probabilities(self) -> None:
        """Record the supervisor's leak probabilities until cancelled."""
        while True:
            view = self._poller.snapshot.view
            if view is not None and (not self._odds or view.time > self._odds[-1].at):
                growth = [
                    one.confidence
                    for one in view.assessment.suspicions
                    if one.kind is IncidentKind.HOST_GROWTH
                ]
                self._odds.append(LeakProbability(view.time, max(growth, default=0.0)))
            await asyncio.sleep(WATCH_S)

    async def _watch(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            view = self._poller.snapshot.view
            ended = [incident for incident in view.recent if incident.ended] if view else []
            if find_cured(ended) is not None:
                self._status = "resolved: streaming for a few more seconds"
                await asyncio.sleep(EXTRA_STREAMING_S)
                return
            await asyncio.sleep(WATCH_S)
        self.problems.append("the time ended before an incident was resolved")

    def _screens(self) -> Callable[[], Screen]:
        base, clients = screen_factory(self._plan, self._poller), self._clients
        return lambda: replace(base(), traffic=clients.traffic(), note=self._status)


def _recorder(plan: Plan, file: Path, on_exit: Callable[[str], None]) -> Container:
    """Return the supervisor's recorder as a further process."""
    program = (sys.executable, "-m", "plimsoll_cli.main", "record")
    argv = (*program, str(file.absolute()), f"--run-dir={plan.root}")
    return Container(
        Command("recorder", argv, plan.supervisor.env, plan.root / "recorder.log"), on_exit
    )


def _torch_allocated(poller: Poller) -> int | None:
    """Return torch's allocated bytes on all devices; None on a CPU or if one is unknown."""
    status = poller.snapshot.status
    sizes = [device.torch_allocated for device in status.devices] if status else []
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None
