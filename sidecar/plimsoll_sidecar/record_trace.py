"""``plimsoll record``: writes a trace from a live engine, for ``plimsoll replay``."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from plimsoll_api import trace
from plimsoll_api.admin import Status
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.supervisor_config import SupervisorConfig
from plimsoll_api.trace import Budgets, EngineInfo, Header, Limits, Sample, TraceBudget
from plimsoll_sidecar.act.adapters.engine_adapter import adapter_for
from plimsoll_sidecar.signals.device_memory import AmdExporter, Dcgm, Pod
from plimsoll_sidecar.signals.sampler import Sampler

FIRST_ANSWER_S = 60.0
"""How long the engine may take to answer first; then the recording begins without its version."""


class TraceWriter:
    """Writes samples as they come. Each line is whole before the next begins.

    A file that ends in ``.gz`` is compressed. Raises OSError where it cannot be written.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._out = trace.open_for_writing(path)
        self._last_t = float("-inf")
        trace.write_line(self._out, header)

    def write(self, sample: Sample) -> None:
        """Sample whose time does not go forward are left out: a trace must increase."""
        if sample.t > self._last_t:
            self._last_t = sample.t
            trace.write_line(self._out, sample)
            self._out.flush()

    def close(self) -> None:
        """End the file: a gzip file is readable as a whole only after this."""
        self._out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def header_for(config: SupervisorConfig, status: Status | None = None) -> Header:
    """Return the header of a recording that begins now."""
    host, device = config.memory.host, config.memory.device
    return Header(
        trace=1,
        name=config.service.name,
        engine=EngineInfo(
            type=config.engine.type.value,
            version=status.version if status else config.engine.version,
            model=status.model if status else config.engine.model,
        ),
        started_at=datetime.now(UTC).isoformat(),
        interval_s=config.sample_interval_s,
        limits=Limits(
            host=host.limit_bytes if host else None,
            device=device.limit_bytes if device else None,
        ),
        budget=Budgets(host=_budget(host), device=_budget(device)),
        warmup_s=config.memory.warmup_s,
        shared_device=config.memory.shared_device,
    )


def record(
    config: SupervisorConfig,
    token_file: Path,
    out: Path,
    stopped: Callable[[float], bool],
    duration_s: float | None = None,
) -> int:
    """Sample the engine until ``stopped`` or ``duration_s`` is over; return the count of samples.

    ``stopped`` waits the seconds that it is given, at most, and says whether to end. Raises OSError
    where ``out`` cannot be written.
    """
    mine = Pod.of_environment(config.engine.container)
    sampler = Sampler(
        adapter_for(config.engine, token_file),
        exporter=Dcgm.of_node(mine),
        amd=AmdExporter.of_node(mine),
    )
    begin = time.monotonic()
    end = float("inf") if duration_s is None else begin + duration_s
    while sampler.sample() and sampler.status is None:
        if time.monotonic() > min(end, begin + FIRST_ANSWER_S) or stopped(0.25):
            break
    count = 0
    with TraceWriter(out, header_for(config, sampler.status)) as writer:
        due = time.monotonic()
        while time.monotonic() < end:
            writer.write(sampler.sample())
            count += 1
            due = max(due + config.sample_interval_s, time.monotonic())
            if stopped(max(0.0, min(due, end) - time.monotonic())):
                break
    return count


def _budget(budget: MemoryBudget | None) -> TraceBudget | None:
    return TraceBudget(budget.growth_bytes, budget.window_s) if budget else None
