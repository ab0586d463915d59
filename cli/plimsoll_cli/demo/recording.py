"""The trace of the leaky service, written by the supervisor's own recorder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from plimsoll_cli.errors import RunError
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import Command, Plan
from plimsoll_sidecar import trace
from plimsoll_sidecar.trace import Sample, TraceError

STOP_S = 10.0


def container(plan: Plan, file: Path, on_exit: Callable[[str], None]) -> Container:
    """The recorder as one more process beside engine and supervisor."""
    program = (sys.executable, "-m", "plimsoll_cli.main", "record")
    argv = (*program, str(file.absolute()), f"--run-dir={plan.root}")
    return Container(
        Command("recorder", argv, plan.supervisor.env, plan.root / "recorder.log"), on_exit
    )


def read(file: Path) -> tuple[float, list[Sample]]:
    """When it began (Unix seconds) and the samples. Raises RunError."""
    try:
        header, samples = trace.read(file)
        return datetime.fromisoformat(header.started_at).timestamp(), list(samples)
    except (TraceError, ValueError) as error:
        raise RunError(str(error)) from None
