"""The supervisor of the tests: everything real but the sampler and the detector, which read the
stand-in engine's own figures so that a whole incident takes two seconds.

``--kill-at N`` ends the process with SIGKILL right after the N-th write of the journal;
``--kill-before N`` right before it. ``--file-limit`` bounds the size of every file.
``--step SECONDS`` sets the wall clock of this process by so much, at the write that ``--step-at``
names (right before it, so that the state of before meets the clock of after). ``--fill-at N`` fills
the state volume right before the N-th write.
The number of writes and the resident KiB are printed at the end.
"""

import argparse
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil

from plimsoll_api.admin import Status
from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.state import Signal
from plimsoll_api.trace import Malloc, Sample, SampleLoad
from plimsoll_sidecar import clock
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine
from plimsoll_sidecar.act.slots import Slots
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.config import ConfigFile
from plimsoll_sidecar.detect.detector import Checkpoint, Detector
from plimsoll_sidecar.record.diagnostics import DiagnosticsWriter
from plimsoll_sidecar.record.journal import Journal
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.process_table import ProcessId
from plimsoll_sidecar.signals.sampler import Sampler
from plimsoll_sidecar.supervisor import Supervisor
from tests.integration.ballast import fill

BASELINE = 100 << 20


class Wall:
    """``time.time`` of this process, which can be set; nothing else of the machine is."""

    def __init__(self) -> None:
        self.step, self._real = 0.0, time.time

    def __call__(self) -> float:
        return self._real() + self.step


class Source:
    def __init__(self, engine: PlimsollEngine) -> None:
        self.engine = engine
        self.status: Status | None = None
        self.signals: dict[str, Signal] = {}
        self.epochs: list[str] = []

    def sample(self) -> Sample:
        try:
            self.status = self.engine.status()
        except EngineError:
            self.status = None
            return Sample(t=time.monotonic(), epoch=len(self.epochs), scrape_ok=False)
        if self.status.epoch not in self.epochs:
            self.epochs.append(self.status.epoch)
        worker = self.status.processes[1]
        return Sample(
            t=time.monotonic(),
            epoch=len(self.epochs),
            malloc=Malloc(python_objects=worker.python_objects),
            load=SampleLoad(running=1, steps_total=self.status.load.steps_total),
        )


class Judge:
    """Growth over 8 MiB is a leak; no answer or no step at all is a stall."""

    def make_checkpoint(self) -> Checkpoint:
        return Checkpoint()

    def resume(self, checkpoint: Checkpoint) -> None:
        pass

    def update(self, sample: Sample) -> Assessment:
        suspicions, host = [], None
        stalled = not sample.scrape_ok or sample.load.steps_total == 0
        if stalled:
            suspicions.append(
                Suspicion(kind=IncidentKind.STALL, segment=None, confidence=1.0, consumed_ratio=0.0)
            )
        size = sample.malloc.python_objects if sample.malloc else None
        if size is not None:
            grown = size - BASELINE
            host = BudgetState(current=size, baseline=BASELINE, explained=0, unexplained=grown)
            if grown > 8 << 20:
                suspicions.append(
                    Suspicion(
                        kind=IncidentKind.HOST_GROWTH,
                        segment=Segment.PYTHON_OBJECTS,
                        confidence=0.9,
                        consumed_ratio=2.0,
                        bytes=grown,
                        over_budget=True,
                        process="worker",
                    )
                )
        return Assessment(
            t=sample.t, epoch=sample.epoch, warm=host is not None, suspicions=suspicions, host=host
        )


def main() -> int:
    parse = argparse.ArgumentParser()
    parse.add_argument("--config", type=Path, required=True)
    parse.add_argument("--run-dir", type=Path, required=True)
    parse.add_argument("--state-dir", type=Path, required=True)
    parse.add_argument("--kill-at", type=int, default=0)
    parse.add_argument("--kill-before", type=int, default=0)
    parse.add_argument("--wall", type=float, default=0.0, help="seconds, from the begin on")
    parse.add_argument("--fill-at", type=int, default=0)
    parse.add_argument("--step-at", type=int, default=0)
    parse.add_argument("--step", type=float, default=0.0)
    parse.add_argument("--limit", type=float, default=45.0)
    parse.add_argument("--file-limit", type=int, default=0)
    arguments = parse.parse_args()
    logging.basicConfig(level=logging.INFO)
    if arguments.file_limit:
        # The kernel refuses to let any file grow further, as a full volume does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.file_limit, arguments.file_limit))
    write, writes = Journal.write, 0

    def counted(self: Journal, *rest: Any, **named: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == arguments.fill_at:
            fill(arguments.state_dir)
        if writes == arguments.step_at:
            wall.step += arguments.step
        if writes == arguments.kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, *rest, **named)
        if writes == arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.write = counted  # type: ignore[method-assign]
    config = ConfigFile(arguments.config)
    engine = PlimsollEngine(config.current.engine, arguments.run_dir / "admin-token")
    policy = config.current.supervision.restart_budget

    def create_actuator(frontend: Callable[[], ProcessId | None]) -> Actuator:
        diagnostics = DiagnosticsWriter(engine, arguments.state_dir, arguments.run_dir, frontend)
        state_dir = arguments.state_dir
        return Actuator(engine, Slots(), None, diagnostics.save, state_dir, policy, frontend)

    wall = Wall()
    wall.step = arguments.wall
    clock.SteadyClock.__init__.__defaults__ = (
        None,
        wall,
        clock.read_boottime_s,
        clock.read_boot_id,
    )
    supervisor = Supervisor(
        config,
        cast(Sampler, Source(engine)),
        lambda config: cast(Detector, Judge()),
        create_actuator,
        None,
        Metrics(),
        arguments.state_dir,
        "standin",
    )
    deadline = time.monotonic() + arguments.limit
    ending = threading.Event()

    def stopped(seconds: float) -> bool:
        ending.wait(seconds)
        idle = supervisor._governor.state.pending is None
        kept = supervisor._journal
        ended = idle and any(i.ended for i in kept.recent) and not kept.unwritten
        return time.monotonic() > deadline or (
            ended
            and not supervisor._governor.state.incidents
            and supervisor._governor.state.slot_holder is None
        )

    supervisor.run(stopped)
    print(writes, int(psutil.Process().memory_info().rss / 1024))
    return 0 if time.monotonic() < deadline else 1


if __name__ == "__main__":
    sys.exit(main())
