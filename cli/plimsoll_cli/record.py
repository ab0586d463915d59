"""``plimsoll record``: a trace of a service that runs on this machine."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import msgspec

from plimsoll_api import supervision
from plimsoll_api.supervision import CONFIG_FILE, SupervisorConfig
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import root
from plimsoll_sidecar import record_trace, trace
from plimsoll_sidecar.launcher import TOKEN_FILE


def run(out: Path, service: str | None, run_dir: Path | None, duration_s: float | None) -> int:
    """Records until ``duration_s``, SIGINT or SIGTERM; the count of samples."""
    if not out.name.endswith(trace.SUFFIXES):
        raise UsageError(f"{out}: name it with one of {', '.join(trace.SUFFIXES)}")
    if run_dir is None and service is None:
        raise UsageError("record: give the name of a service that runs here, or --run-dir")
    folder = run_dir or root.of(service or "")
    config = _config(folder / "etc" / CONFIG_FILE)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: ending.set())
    token_file = folder / "run" / TOKEN_FILE
    try:
        return record_trace.record(config, token_file, out, ending.wait, duration_s)
    except OSError as error:
        raise RunError(f"{error.filename or out}: {error.strerror}") from None


def _config(file: Path) -> SupervisorConfig:
    try:
        return supervision.decode(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}: does the service run here?") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{file}: {error}") from None
