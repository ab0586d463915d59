"""Faults of frontend and worker in the real processes, and what a worker restart returns."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plimsoll_sidecar.signals.process_table import find_nearest_to_limit

REQUESTS = 9
SEGMENT = 64 << 10
FAULTS = (
    f"metric_labels;descriptor_growth;shared_orphan:bytes_per_request={SEGMENT};slice_kept;"
    "cache_fills:text_bytes=16Ki"
)


def orphans(worker: int) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"plimsoll-fault-{worker}-*"))


def pipes(pid: int) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in between
            count += "pipe:" in str(link.readlink())
    return count


def often(look: Callable[[], int]) -> Iterator[int]:
    for _ in range(20):
        yield look()
        time.sleep(0.02)


def series(engine: Any) -> int:
    lines = engine.get("/metrics")[1].splitlines()
    return sum(
        line.startswith("plimsoll_engine_request_generation_tokens_total{") for line in lines
    )


def seen(pid: int) -> int:
    """The open files of the engine's process, as the supervisor counts them."""
    files = find_nearest_to_limit({pid: "frontend"})
    assert files is not None
    return files.open


def test_faults_of_real_processes(start_engine: Any) -> None:
    engine = start_engine(inject=FAULTS).wait_ready()
    names = {fault.partition(":")[0] for fault in FAULTS.split(";")}
    assert set(engine.status()["injections"]) == names
    frontend, worker = engine.process.pid, engine.worker_pid()
    # Others come and go with what the frontend does at its start.
    open_before = statistics.mode(often(lambda: pipes(frontend)))
    try:
        for number in range(REQUESTS):
            engine.stream(number, 4, False)
        # The client reads the last token before the worker has ended the request.
        engine.until(lambda: len(orphans(worker)) == REQUESTS, "one segment for each request")
        assert sum(path.stat().st_blocks * 512 for path in orphans(worker)) == REQUESTS * SEGMENT
        engine.until(lambda: pipes(frontend) - open_before == REQUESTS, "one pipe for each request")
        # Connections come and go, so that the count before says nothing.
        engine.until(lambda: seen(frontend) == len(os.listdir(f"/proc/{frontend}/fd")), "all seen")
        assert series(engine) == REQUESTS
        findings = engine.found(
            lambda: (audit := engine.admin("GET", "/audit")[1])["idle"] and audit["findings"],
            "findings at rest",
        )
        assert [finding["rule"] for finding in findings] == ["ledger_within_bounds"]
        assert "grammar_cache holds" in findings[0]["detail"]

        engine.begin("restart", "cure", carry=True, deadline_s=30.0)
        assert engine.finish("cure", 120)["state"] == "succeeded"
        assert engine.worker_pid() != worker
        assert len(orphans(worker)) == REQUESTS, "nobody holds them, and nobody removes them"
        engine.stream(REQUESTS, 4, False)
        assert orphans(engine.worker_pid()) == [], "the next worker is healthy"
        assert series(engine) == REQUESTS + 1, "the frontend's faults last as long as it does"
        engine.clean()
    finally:
        for path in orphans(worker):
            path.unlink()
