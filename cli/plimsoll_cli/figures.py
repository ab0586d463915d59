"""Results of a measurement as a JSON object: the figures, the machine and the command.

The names of figures end with the unit; ``_low`` and ``_high`` mark the ends of an interval. A
figure that could not be measured is absent, never zero.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll_api.times import format_rfc3339

PACKAGE_FOLDER = Path(__file__).resolve().parent
UNIT_SUFFIXES = (
    "_s",
    "_bytes",
    "_mib",
    "_ratio",
    "_tok_s",
    "_count",
    "_per_request",
    "_hours",
    "_minutes",
)
_NAME_PATTERN = re.compile(rf"^[a-z][a-z0-9_]*({'|'.join(UNIT_SUFFIXES)})(_low|_high)?$")


def make_result(
    name: str,
    figures: Mapping[str, float | int | None],
    command: Sequence[str],
    samples: Any = None,
) -> dict[str, Any]:
    """Return the result ``name`` as a JSON object.

    Raises ValueError if the name of a figure does not end with a unit.
    """
    for key in figures:
        if not _NAME_PATTERN.match(key):
            raise ValueError(
                f"figure {key!r}: write the name in snake_case, and end it with a unit: "
                f"{', '.join(UNIT_SUFFIXES)}"
            )
    return {
        "name": name,
        "date": format_rfc3339(time.time()),
        "machine": describe_machine(),
        "commit": find_commit(),
        "command": shlex.join(command),
        "figures": {k: _round_figure(v) for k, v in figures.items() if v is not None},
        "samples": samples,
    }


def compute_percentile(values: Sequence[float], fraction: float) -> float | None:
    """Return a percentile by nearest rank; None without values. A ``fraction`` of .99 means p99."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[
        min(len(ordered) - 1, max(0, -(-round(fraction * 1e6) * len(ordered) // 10**6) - 1))
    ]


def describe_machine() -> dict[str, Any]:
    """Return the machine's processor, memory, accelerators and software versions, where known."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": _read_cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": _list_devices() or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def find_commit(folder: Path = PACKAGE_FOLDER) -> str | None:
    """Return the commit of the git repository around ``folder``; None if there is none.

    The suffix ``-dirty`` marks uncommitted changes outside of ``research/bench/results``.
    """
    sources = (":/", ":(top,exclude)research/bench/results")
    try:
        head = _run_git(folder, "rev-parse", "HEAD")
        changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no", "--", *sources)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def _run_git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True, text=True, check=True, timeout=10,
    )  # fmt: skip
    return done.stdout.strip()


def _read_cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None
    )


def _list_devices() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no library, no driver or no device: all the same here
        return []
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _round_figure(value: float | int) -> float | int:
    return float(f"{value:.6g}") if isinstance(value, float) else value
