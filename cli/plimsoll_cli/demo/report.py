"""The folder that the demo leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from plimsoll_cli.demo import story
from plimsoll_cli.demo.evidence import Observed, cured, pauses, restarts
from plimsoll_cli.demo.story import Values
from plimsoll_cli.figures import result

NAME = "demo"


def write(
    out: Path,
    seen: Observed,
    values: Values,
    missing: list[str],
    service: str,
    budget_bytes: int | None,
    command: list[str],
) -> str:
    """Write ``report.json``, ``incident.json``, ``memory.png`` and ``story.txt``; return the story.

    The trace is there already. Raises OSError.
    """
    from plimsoll_cli.demo import picture  # matplotlib takes a second

    report = result(NAME, values, command, _samples(seen))
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    incident = cured(seen.incidents) or next(iter(seen.incidents), None)
    body = msgspec.json.format(msgspec.json.encode(incident), indent=2)
    (out / "incident.json").write_bytes(body + b"\n")
    text = story.tell(service, seen, values, missing)
    (out / "story.txt").write_text(text)
    picture.draw(out / "memory.png", f"{service}: host memory and streams", seen, budget_bytes)
    return text


def _samples(seen: Observed) -> dict[str, Any]:
    windows = restarts(seen.incidents)
    start = seen.times.traffic_from
    return {
        "pauses_s": [round(gap, 4) for gap in sorted(pauses(seen.replies, windows))],
        "worker_restarts_s": [[round(a - start, 3), round(b - start, 3)] for a, b in windows],
        "incidents": [incident.name for incident in seen.incidents],
    }
