"""Run the leaky service together with clients, a recorder and the live view."""

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
    compute_host_memory,
    find_cured_incident,
)
from plimsoll_cli.demo.streams import StreamingClients, get_unix_time
from plimsoll_cli.local import runner, traces
from plimsoll_cli.local.command import make_screen_factory
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import Command, Plan
from plimsoll_cli.local.status import Poller
from plimsoll_cli.local.view import LiveView, Screen

IDLE_PHASE_S = 4.0
"""Duration of the idle phase before the traffic, enough for several samples."""
EXTRA_STREAMING_S = 8.0
"""Time for which the clients continue to send requests after an incident was resolved."""
POLL_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 10.0


class DemoRun:
    """One run of the leaky service.

    ``problems`` lists failures that the results do not show, such as an exit of a container.
    """

    def __init__(
        self, service: InferenceService, plan: Plan, texts: Sequence[str], streams: int
    ) -> None:
        self.problems: list[str] = []
        self._plan, self._count = plan, streams
        self._clients = StreamingClients(plan.serving_url, service.served_name, streams, texts)
        self._poller = Poller(plan)
        self._times = PhaseTimes(0.0, 0.0, 0.0, 0.0)
        self._device = DeviceBytes()
        self._probabilities: list[LeakProbability] = []
        self._status = ""

    async def run(
        self, trace: Path, deadline: float, console: Console | None, print_line: runner.PrintLine
    ) -> Observations:
        """Run the leaky service until a worker restart has resolved an incident, or ``deadline``.

        ``deadline`` is a time of the event loop.
        """

        def record_problem(line: str) -> None:
            self.problems.append(line)
            print_line(line)

        recorder = _make_recorder(self._plan, trace, record_problem)
        async with runner.run_replica(self._plan, record_problem):
            recorder.start()
            background = [self._poller.run(), self._record_probabilities()]
            if console is not None and console.is_terminal:
                background.append(LiveView(console, self._make_screen_factory()).run())
            try:
                async with stopping.run_in_background(*background):
                    await self._run_phases(deadline)
            finally:
                await recorder.stop(STOP_TIMEOUT_S)
        started_at, samples = traces.read_trace(trace)
        return Observations(
            incidents=incidents.read_journal(self._plan.state_dir / JOURNAL_FILE),
            memory=compute_host_memory(samples, started_at),
            replies=self._clients.replies,
            texts_different=self._clients.count_different_replies(),
            streams=self._count,
            times=self._times,
            device=self._device,
            probabilities=self._probabilities,
        )

    async def _run_phases(self, deadline: float) -> None:
        self._status = "idle: measuring the baseline"
        begin = get_unix_time()
        await asyncio.sleep(IDLE_PHASE_S)
        before = _sum_torch_allocated(self._poller)
        traffic = get_unix_time()
        self._status = "streaming"
        streaming = asyncio.create_task(self._clients.run())
        try:
            await self._watch_incidents(deadline)
            self._clients.finish()
            await streaming
        finally:
            streaming.cancel()
        self._status = "idle again"
        quiet = get_unix_time()
        await asyncio.sleep(2 * IDLE_PHASE_S)
        # In the first half, memory of the last requests is freed and reported.
        self._times = PhaseTimes(begin, traffic, quiet + IDLE_PHASE_S, get_unix_time())
        self._device = DeviceBytes(before, _sum_torch_allocated(self._poller))

    async def _record_probabilities(self) -> None:
        while True:
            view = self._poller.snapshot.view
            if view is not None and (
                not self._probabilities or view.time > self._probabilities[-1].at
            ):
                growth = [
                    one.confidence
                    for one in view.assessment.suspicions
                    if one.kind is IncidentKind.HOST_GROWTH
                ]
                self._probabilities.append(LeakProbability(view.time, max(growth, default=0.0)))
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _watch_incidents(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            view = self._poller.snapshot.view
            ended = [incident for incident in view.recent if incident.ended] if view else []
            if find_cured_incident(ended) is not None:
                self._status = "an incident is resolved: streaming for a few more seconds"
                await asyncio.sleep(EXTRA_STREAMING_S)
                return
            await asyncio.sleep(POLL_INTERVAL_S)
        self.problems.append("no incident was resolved before the deadline")

    def _make_screen_factory(self) -> Callable[[], Screen]:
        base, clients = make_screen_factory(self._plan, self._poller), self._clients
        return lambda: replace(base(), traffic=clients.get_traffic_totals(), note=self._status)


def _make_recorder(plan: Plan, file: Path, on_exit: Callable[[str], None]) -> Container:
    program = (sys.executable, "-m", "plimsoll_cli.main", "record")
    argv = (*program, str(file.absolute()), f"--run-dir={plan.root}")
    return Container(
        Command("recorder", argv, plan.supervisor.env, plan.root / "recorder.log"), on_exit
    )


# None without a device or if unknown.
def _sum_torch_allocated(poller: Poller) -> int | None:
    status = poller.snapshot.status
    sizes = [device.torch_allocated for device in status.devices] if status else []
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None
