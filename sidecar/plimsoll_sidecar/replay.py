"""Record traces of an engine and replay them, for ``plimsoll record`` and ``plimsoll replay``.

A replay uses the detector and governor of a running supervisor, but cannot execute commands.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from plimsoll_api import trace
from plimsoll_api.admin import Capability, EngineState, Status
from plimsoll_api.assessment import Assessment, SlowGrowth
from plimsoll_api.manifest import POSITIVE_DURATION_FORM
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy, parse_growth_budget
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervisor_config import SupervisorConfig
from plimsoll_api.trace import (
    Budgets,
    EngineInfo,
    Header,
    Limits,
    Sample,
    TraceBudget,
    TraceError,
)
from plimsoll_api.units import DAY_S
from plimsoll_sidecar.act.adapters.engine_adapter import create_adapter
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.govern.command import EngineView, Event, EventType, Outcome, Result, Turn
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.signals.device_memory import AmdExporter, Dcgm, PodContainer
from plimsoll_sidecar.signals.sampler import Sampler

UNASSESSED_GROWTH = SlowGrowth()
# After this time, the recording starts without the engine's version.
FIRST_ANSWER_TIMEOUT_S = 60.0


class ReplayLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One line of the output, for a sample at the time ``t``. Unknown values are absent.

    ``ended`` means that an incident ended without being confirmed or cleared, and ``still-open``
    that it was neither confirmed nor ended at the last sample.
    """

    event: str
    t: float
    id: str
    kind: str | None = None
    segment: str | None = None
    confidence: float | None = None
    consumed_ratio: float | None = None
    bytes_per_s: float | None = None
    trigger: str | None = None
    reason: str | None = None
    action: str | None = None
    limit_s: float | None = None


class Summary(msgspec.Struct, kw_only=True):
    """Last line of the output: counts of samples, incidents and actions."""

    event: str = "summary"
    samples: int = 0
    duration_s: float = 0.0
    incidents: int = 0
    confirmed: int = 0
    remediations: int = 0


def replay(
    path: Path, mode: Mode = Mode.OBSERVE, budget: MemoryBudget | None = None
) -> Iterator[ReplayLine | Summary]:
    """Yield the events of a trace in order of time, and then a summary.

    A ``budget`` replaces the recorded budget of host memory. Raises :class:`TraceError`.
    """
    header, samples = trace.read(path)
    memory = make_memory_policy(path, header)
    if budget is not None:
        limit = header.limits.host
        if limit is not None and budget.growth_bytes > limit and not budget.auto:
            raise TraceError(f"{path}:1: the budget must not be larger than limits.host ({limit})")
        memory = replace(memory, host=replace(budget, limit_bytes=limit))
    return replay_samples(samples, memory, Supervision(mode=mode), header.interval_s, header.name)


def replay_samples(
    samples: Iterable[Sample],
    memory: MemoryPolicy,
    supervision: Supervision,
    interval_s: float,
    name: str,
) -> Iterator[ReplayLine | Summary]:
    """Yield the events of ``samples`` in order of time, and then a summary."""
    learned = LearnedBudgets()
    learns = any(budget is not None and budget.auto for budget in (memory.host, memory.device))
    governor = Governor(supervision, memory, replica=name)
    governor.apply_budgets(learned.resolve_budgets(memory))
    detector = Detector(governor.memory, supervision.stall.timeout_s, interval_s)
    summary = Summary()
    results: list[Result] = []
    first_t: float | None = None
    last_t = 0.0
    leaking: set[str] = set()
    for sample in samples:
        first_t = sample.t if first_t is None else first_t
        assessment = detector.update(sample)
        yield from _make_slow_leak_lines(assessment, leaking)
        turn = governor.advance(assessment, make_engine_view(sample), sample.t, results)
        results = make_unknown_results(turn)
        if learns:
            learned.observe(
                sample.t, str(sample.epoch), "", assessment, governor.list_growing_kinds()
            )
            budgets = learned.update_and_resolve_budgets(sample.t, memory, governor.budgets)
            if budgets is not None and not governor.state.incidents:
                governor.apply_budgets(budgets)
                checkpoint = detector.make_checkpoint()
                detector = Detector(budgets.memory, supervision.stall.timeout_s, interval_s)
                detector.update(sample)
                detector.resume(checkpoint)
        last_t = sample.t
        summary.samples += 1
        summary.duration_s = round(last_t - first_t, 3)
        for event in turn.events:
            line = make_line(event, sample.t)
            if line is not None:
                _count_line(summary, line)
                yield line
    for incident in governor.state.incidents:
        if incident.confirmed_at is None:
            yield _make_incident_line("still-open", incident, last_t)
    yield summary


def _make_slow_leak_lines(assessment: Assessment, leaking: set[str]) -> Iterator[ReplayLine]:
    # Updates leaking, the kinds of memory with a slow leak.
    for memory in ("host", "device"):
        slow = assessment.slow.get(memory, UNASSESSED_GROWTH)
        if slow.slow_leak == (memory in leaking):
            continue
        leaking ^= {memory}
        yield ReplayLine(
            event="slow-leak" if slow.slow_leak else "slow-leak-ended",
            t=assessment.t,
            id=f"slow-leak-{memory}",
            kind=memory,
            segment=slow.segment,
            bytes_per_s=slow.bytes_per_s,
            limit_s=slow.limit_s,
        )


def make_memory_policy(path: Path, header: Header) -> MemoryPolicy:
    """Return the memory policy in the header of a trace. Raises :class:`TraceError`."""
    if not header.interval_s > 0:
        raise TraceError(f"{path}:1: interval_s must be greater than 0, got {header.interval_s}")
    if not 0 <= header.warmup_s < float("inf"):
        raise TraceError(f"{path}:1: warmup_s must be finite and at least 0, got {header.warmup_s}")
    host = _read_budget(path, "host", header.budget.host, header.limits.host)
    device = _read_budget(path, "device", header.budget.device, header.limits.device)
    return MemoryPolicy(
        host=host,
        device=device,
        shared_device=header.shared_device,
        warmup_s=header.warmup_s,
    )


def make_engine_view(sample: Sample) -> EngineView:
    """Return the state of the engine, with all capabilities."""
    return EngineView(
        epoch=f"trace:{sample.epoch}" if sample.scrape_ok else None,
        state=EngineState.SERVING if sample.scrape_ok else None,
        capabilities=frozenset(Capability),
        replaceable=True,
    )


def make_unknown_results(turn: Turn) -> list[Result]:
    """Return the result ``Unknown`` for the command of ``turn``; empty without a command."""
    if turn.command is None:
        return []
    operation = turn.command.operation_id
    return [
        Result(
            operation_id=operation,
            outcome=Outcome.UNKNOWN,
            message="a replay cannot execute commands",
        )
    ]


def make_line(event: Event, t: float) -> ReplayLine | None:
    """Return the line of output for ``event`` at time ``t``; None if it has no line."""
    incident = event.incident
    match event.type:
        case EventType.OPENED:
            return _make_incident_line("incident", incident, t)
        case EventType.CONFIRMED:
            return _make_incident_line("confirmed", incident, t)
        case EventType.CLEARED:
            return _make_incident_line("cleared", incident, t, _get_end_reason(incident))
        case EventType.ENDED if incident.confirmed_at is None:
            return _make_incident_line("ended", incident, t, _get_end_reason(incident))
        case EventType.REMEDIATION if event.action is not None:
            return ReplayLine(
                event="remediation",
                t=t,
                id=incident.name,
                action=event.action.value,
                trigger=_find_trigger(incident),
            )
    return None


def _make_incident_line(
    event: str, incident: Incident, t: float, reason: str | None = None
) -> ReplayLine:
    attribution = incident.attribution
    return ReplayLine(
        event=event,
        t=t,
        id=incident.name,
        kind=incident.kind.value,
        segment=attribution.segment,
        confidence=attribution.confidence,
        consumed_ratio=incident.consumed_ratio,
        bytes_per_s=attribution.bytes_per_s,
        trigger=_find_trigger(incident),
        reason=reason,
    )


def _get_end_reason(incident: Incident) -> str:
    return incident.message or (incident.reason.value if incident.reason else "")


def _find_trigger(incident: Incident) -> str | None:
    trigger = incident.attribution.trigger
    return trigger.counter if trigger is not None else None


def parse_budget(text: str) -> MemoryBudget:
    """Return the budget in ``text``: ``Auto``, ``2Gi`` or ``2Gi/6h``. Raises ValueError."""
    size, slash, window = text.partition("/")
    return parse_growth_budget(size, POSITIVE_DURATION_FORM.read(window) if slash else DAY_S)


def main(argv: list[str] | None = None) -> int:
    """Replay a trace, and print its events as JSON lines. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m plimsoll_sidecar.replay", description=__doc__)
    parser.add_argument("trace", type=Path, help="trace to replay, a .jsonl or .jsonl.gz file")
    parser.add_argument(
        "--mode",
        type=Mode,
        choices=list(Mode),
        default=Mode.OBSERVE,
        help="mode of the supervisor in the replay: Observe or Recover",
    )
    parser.add_argument(
        "--budget",
        type=parse_budget,
        help="leak budget for host memory that replaces the recorded one: Auto, 2Gi or 2Gi/6h",
    )
    arguments = parser.parse_args(argv)
    try:
        print_replay(arguments.trace, arguments.mode, arguments.budget)
    except TraceError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def print_replay(path: Path, mode: Mode, budget: MemoryBudget | None = None) -> None:
    """Print the events of a trace as JSON lines. Raises :class:`TraceError`."""
    try:
        for line in replay(path, mode, budget):
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    except BrokenPipeError:
        return


def _count_line(summary: Summary, line: ReplayLine) -> None:
    summary.incidents += line.event == "incident"
    summary.confirmed += line.event == "confirmed"
    summary.remediations += line.event == "remediation"


def _read_budget(
    path: Path, kind: str, budget: TraceBudget | None, limit_bytes: int | None
) -> MemoryBudget | None:
    if budget is None:
        return None
    if budget.growth <= 0 or not budget.window_s > 0:
        raise TraceError(f"{path}:1: growth and window_s of budget.{kind} must be greater than 0")
    if limit_bytes is not None and limit_bytes <= 0:
        raise TraceError(
            f"{path}:1: limits.{kind} must be greater than 0 or null, got {limit_bytes}"
        )
    return MemoryBudget(
        growth_bytes=budget.growth, window_s=budget.window_s, limit_bytes=limit_bytes
    )


class TraceWriter:
    """Writes samples to a trace, compressed if its name ends in ``.gz``. Raises OSError."""

    def __init__(self, path: Path, header: Header) -> None:
        self._out = trace.open_for_writing(path)
        self._last_t = float("-inf")
        trace.write_line(self._out, header)

    def write(self, sample: Sample) -> None:
        """Write a sample if it is later than the last one, because times must increase."""
        if sample.t > self._last_t:
            self._last_t = sample.t
            trace.write_line(self._out, sample)
            self._out.flush()

    def close(self) -> None:
        """Close the file. A compressed file is complete only after this call."""
        self._out.close()


def make_header(config: SupervisorConfig, status: Status | None = None) -> Header:
    """Return the header of a trace. ``status`` is None if the engine does not answer."""
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
        budget=Budgets(host=_make_trace_budget(host), device=_make_trace_budget(device)),
        warmup_s=config.memory.warmup_s,
        shared_device=config.memory.shared_device,
    )


def record(
    config: SupervisorConfig,
    token_file: Path,
    out: Path,
    wait_for_stop: Callable[[float], bool],
    duration_s: float | None = None,
) -> int:
    """Record samples of the engine to the trace ``out``, and return their number.

    The recording ends when ``wait_for_stop`` returns True, or after ``duration_s`` seconds; None
    for
    no limit. Raises OSError if the trace cannot be written.
    """
    mine = PodContainer.from_environment(config.engine.container)
    sampler = Sampler(
        create_adapter(config.engine, token_file),
        dcgm=Dcgm.from_environment(mine),
        amd=AmdExporter.from_environment(mine),
    )
    begin = time.monotonic()
    end = float("inf") if duration_s is None else begin + duration_s
    while sampler.sample() and sampler.status is None:
        if time.monotonic() > min(end, begin + FIRST_ANSWER_TIMEOUT_S) or wait_for_stop(0.25):
            break
    count = 0
    with closing(TraceWriter(out, make_header(config, sampler.status))) as writer:
        due = time.monotonic()
        while time.monotonic() < end:
            writer.write(sampler.sample())
            count += 1
            due = max(due + config.sample_interval_s, time.monotonic())
            if wait_for_stop(max(0.0, min(due, end) - time.monotonic())):
                break
    return count


def _make_trace_budget(budget: MemoryBudget | None) -> TraceBudget | None:
    return TraceBudget(budget.growth_bytes, budget.window_s) if budget else None


if __name__ == "__main__":
    sys.exit(main())
