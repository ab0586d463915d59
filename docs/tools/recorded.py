"""Panels of the service dashboard with what a real vLLM did: ``python -m docs.tools.recorded``.

A recording on an H100 goes through the supervisor's detector and governor. What the supervisor
would have shown on its metrics page each :data:`SCRAPE_S` seconds becomes blocks of a Prometheus,
at the times of the run, and the panels' own queries are asked of that.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from docs.tools import picture
from docs.tools.scene import ROOT, SCRAPE_S, Scene, prometheus
from plimsoll_api import trace
from plimsoll_api.supervision import Supervision
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.govern.command import Result
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.replay import make_engine_view, make_memory_policy, make_unknown_results
from plimsoll_sidecar.signals.cgroup import CgroupMemory

RECORDING = ROOT / "research" / "leaklab" / "recordings" / "seen" / "h100-vllm-03.jsonl.gz"
"""vLLM 0.24.0 loses Python objects with each aborted request, from 121 s on."""
PICTURE = ROOT / "docs" / "img" / "dashboard-vllm.png"
PANELS = (
    "Host memory by segment", "Host growth that nothing explains", "Device memory by segment",
    "Time to exhaustion",
)  # fmt: skip
LABELS = '{namespace="default",service="vllm",pod="vllm-0"'


def exposition(recording: Path) -> tuple[str, float, float]:
    """What was scraped, as OpenMetrics, and the begin and the end of the run in Unix seconds."""
    header, samples = trace.read(recording)
    began = datetime.fromisoformat(header.started_at).timestamp()
    memory, supervision = make_memory_policy(recording, header), Supervision()
    governor = Governor(supervision, memory, replica=header.name)
    detector = Detector(memory, supervision.stall.timeout_s, header.interval_s)
    metrics = Metrics(CgroupMemory)
    metrics.export_budgets(memory)
    results: list[Result] = []
    families: dict[str, tuple[str, list[str]]] = {}
    at, due = 0.0, 0.0
    for sample in samples:
        at, assessment = sample.t, detector.update(sample)
        turn = governor.advance(assessment, make_engine_view(sample), at, results)
        results = make_unknown_results(turn)
        known = {"engine": sample.scrape_ok, "host": True, "device": bool(sample.device)}
        metrics.observe(assessment, known, 0.0)
        metrics.count_events(turn.events)
        if at >= due:
            due = at + SCRAPE_S
            for family in text_string_to_metric_families(metrics.render().decode()):
                kind = family.type if family.type in ("counter", "gauge") else "unknown"
                lines = families.setdefault(family.name, (kind, []))[1]
                for one in family.samples:
                    more = "".join(f',{key}="{value}"' for key, value in one.labels.items())
                    lines.append(f"{one.name}{LABELS}{more}}} {one.value} {began + at:.3f}")
    text = "".join(
        f"# TYPE {name} {kind}\n" + "".join(f"{line}\n" for line in lines)
        for name, (kind, lines) in families.items()
    )
    return f"{text}# EOF\n", began, began + at


@contextlib.contextmanager
def scene_of(recording: Path, work: Path) -> Iterator[Scene]:
    """A Prometheus with what was scraped. FileNotFoundError where it is not installed."""
    tool = shutil.which("promtool")
    if tool is None:
        raise FileNotFoundError("promtool is missing: apt-get install prometheus")
    text, began, ended = exposition(recording)
    scraped, blocks = work / "scraped.txt", work / "tsdb"
    scraped.write_text(text)
    command = [tool, "tsdb", "create-blocks-from", "openmetrics", str(scraped), str(blocks)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with prometheus(work, {}) as server:
        yield Scene(began, ended, "", "", work, server)


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="plimsoll-recorded-") as name,
        scene_of(RECORDING, Path(name)) as seen,
    ):
        picture.draw("service", PANELS, seen, PICTURE)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
