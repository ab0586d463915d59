"""``docs/conformance.md``: what ran, and nothing else."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "bench" / "results" / "conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
HEAD = """# Conformance

Cases that passed with real engines, run by `make test-engines`, `make test-long` (those of a
policy, in pods of a real node) or `research/bench/real_engines.py`. A case that is not here did not
run, or did not pass: the figures of those that failed are in
`research/bench/results/real-engines.json`. Times are seconds from the cause to the supervisor's
confirmation, or as the case says. Rows without a device ran on two processor cores that other
programs kept busy.

| engine | version | case | seconds | | ran |
|---|---|---|---:|---|---|
"""


@dataclass(frozen=True)
class Ran:
    """One case that passed."""

    engine: str
    version: str
    case: str
    seconds: float | None
    told: str


def write(ran: Ran, when: dict[str, str] | None = None) -> None:
    """Puts what ran beside what is known of other cases, and renders the page. ``when`` has the
    date and commit of a run that was not just now."""
    known = json.loads(RESULTS.read_text())["samples"] if RESULTS.exists() else []
    rows = {(row["engine"], row["version"], row["case"]): row for row in known}
    rows[ran.engine, ran.version, ran.case] = asdict(ran) | (when or _now())
    samples = [rows[key] for key in sorted(rows)]
    document = {
        "name": "conformance",
        "command": "make test-engines",
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        **_now(),
        "figures": {"cases_count": len(samples)},
        "samples": samples,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    PAGE.write_text(page(samples))


def page(samples: list[dict[str, object]]) -> str:
    lines = []
    for row in samples:
        seconds = "" if row["seconds"] is None else row["seconds"]
        when = f"{row['date']}, {row['commit']}"
        cells = (row["engine"], row["version"], row["case"], seconds, row["told"], when)
        lines.append("| " + " | ".join(map(str, cells)) + " |\n")
    return HEAD + "".join(lines)


def _now() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())["samples"]))
