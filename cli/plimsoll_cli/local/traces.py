"""Record and replay traces of a service on this machine, with the supervisor's code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from plimsoll_api import supervisor_config, trace
from plimsoll_api.decoding import MalformedError
from plimsoll_api.incident_record import JOURNAL_FILE
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.names import TOKEN_FILE
from plimsoll_api.supervision import Mode
from plimsoll_api.supervisor_config import CONFIG_FILE, SupervisorConfig
from plimsoll_api.times import parse_rfc3339
from plimsoll_api.trace import Sample, TraceError
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import run_dir as folders
from plimsoll_sidecar import replay as replaying
from plimsoll_sidecar import tune
from plimsoll_sidecar.detect.segments import HostMemoryFields
from plimsoll_sidecar.record.storage import read_learned_budgets
from plimsoll_sidecar.tune import DayGrowth as DayGrowth
from plimsoll_sidecar.tune import Tuning as Tuning


def record_trace(
    out: Path, service: str | None, run_dir: Path | None, duration_s: float | None
) -> int:
    """Record a trace into ``out``, and return the number of samples.

    It ends when ``duration_s`` has passed or a signal arrives. Raises UsageError and RunError.
    """
    if not out.name.endswith(trace.TRACE_SUFFIXES):
        raise UsageError(
            f"{out}: use a name that ends with one of {', '.join(trace.TRACE_SUFFIXES)}"
        )
    if run_dir is None and service is None:
        raise UsageError("record: specify the name of a service on this machine, or --run-dir")
    folder = run_dir or folders.get_service_dir(service or "")
    config = _read_config(folder / "etc" / CONFIG_FILE)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: ending.set())
    token_file = folder / "run" / TOKEN_FILE
    try:
        return replaying.record(config, token_file, out, ending.wait, duration_s)
    except OSError as error:
        raise RunError(
            f"{error.filename or out}: cannot record the trace: {error.strerror}"
        ) from None


def replay_trace(file: Path, mode: Mode, budget: str | None) -> None:
    """Replay a trace, and print the supervisor's output. Raises UsageError."""
    try:
        given = replaying.parse_budget(budget) if budget is not None else None
    except ValueError as error:
        raise UsageError(f"--budget {budget}: {error}") from None
    try:
        replaying.print_replay(file, mode, given)
    except TraceError as error:
        raise UsageError(str(error)) from None


def compute_tunings(source: str, run_dir: Path | None, limit: int | None) -> list[Tuning]:
    """Return the growth and recommended budget of each kind of memory. Raises UsageError.

    ``source`` is a service on this machine, or the path of a journal, a trace or a series.
    """
    file = Path(source)
    if limit is not None and file.suffix != ".csv":
        raise UsageError(
            "--limit: only a series (.csv) takes a limit; a service, a journal and a trace have"
            " their own"
        )
    if run_dir is None and not file.exists() and ("." in source or "/" in source):
        raise UsageError(f"{source}: the file does not exist")
    try:
        if source.endswith(trace.TRACE_SUFFIXES):
            learned, memory = tune.learn_from_trace(file)
        elif file.suffix == ".csv":
            learned, memory = tune.learn_from_series(file, limit), MemoryPolicy()
        elif file.is_file():
            learned, memory = read_learned_budgets(file), MemoryPolicy()
        else:
            folder = run_dir or folders.get_service_dir(source)
            memory = _read_config(folder / "etc" / CONFIG_FILE).memory
            learned = read_learned_budgets(folder / "state" / JOURNAL_FILE)
    except OSError as error:
        raise UsageError(
            f"{error.filename or source}: cannot read the file: {error.strerror}"
        ) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return tune.make_tunings(learned, memory)


def read_trace(file: Path) -> tuple[float, list[Sample]]:
    """Return the start of a trace in Unix seconds, and its samples. Raises RunError."""
    try:
        header, samples = trace.read(file)
        return parse_rfc3339(header.started_at), list(samples)
    except (TraceError, ValueError) as error:
        raise RunError(str(error)) from None


def compute_host_memory(samples: Iterable[Sample]) -> list[tuple[float, int]]:
    """Return pairs of seconds since the start and host memory in bytes, as in the detector."""
    found = list(samples)
    source = next(
        (s for s in (HostMemoryFields.choose(sample.host) for sample in found) if s), None
    )
    if source is None:
        return []
    sizes = ((sample.t, source.sum_bytes(sample.host)) for sample in found)
    return [(t, size) for t, size in sizes if size is not None]


def _read_config(file: Path) -> SupervisorConfig:
    try:
        return supervisor_config.decode_config(file.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"{file} does not exist: check that the service runs on this machine"
        ) from None
    except OSError as error:
        raise UsageError(f"{file}: cannot read the file: {error.strerror}") from None
    except MalformedError as error:
        raise UsageError(f"{file}: {error}") from None
