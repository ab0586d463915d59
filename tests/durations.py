"""What each test file costs, kept where a review can compare it.

A run with ``--durations-file PATH`` writes there, by file, how many tests ran, their CPU seconds
and their seconds on the clock, and which tests passed only when run again, with the cause.
``make test`` writes ``durations.json`` beside the Makefile; ``tests/durations.json`` is the
record in the repository:

    python -m tests.durations diff [RUN]   what costs more or less now, the largest first
    python -m tests.durations keep [RUN]   make a run the record; files that it did not run stay
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / "durations.json"
RECORD = ROOT / "tests" / "durations.json"
NOISE_S = 1.0
NOISE_SHARE = 0.2
"""A file is dearer or cheaper from this many CPU seconds and this share of its cost on."""
DEAR_S = 3.0
"""A test that costs this many CPU seconds has its own entry in the record."""
_TICKS = os.sysconf("SC_CLK_TCK")


def tree_cpu_s(pid: int | None = None) -> float:
    """CPU seconds of a process (this one) and of all that it started, ended ones included.

    Of what has ended, those count whose parent waited for them. Threads of this process too.
    """
    total, waiting = 0, [str(pid or "self")]
    while waiting:
        at = f"/proc/{waiting.pop()}"
        with contextlib.suppress(OSError):
            stat = Path(f"{at}/stat").read_bytes()  # a program's name may be in no encoding
            total += sum(map(int, stat[stat.rindex(b")") + 2 :].split()[11:15]))
            for task in os.listdir(f"{at}/task"):
                waiting += Path(f"{at}/task/{task}/children").read_text().split()
    return total / _TICKS


class Durations:
    """The plugin: measures in the process that runs the tests, writes in the one that reports."""

    def __init__(self, target: Path | None) -> None:
        self._target = target
        self._before = 0.0
        self._files: defaultdict[str, dict[str, Any]] = defaultdict(
            lambda: {"tests": 0, "cpu_s": 0.0, "wall_s": 0.0}
        )
        self._tests: defaultdict[str, float] = defaultdict(float)
        self._causes: dict[str, str] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """After each phase: what it cost travels with its report, between processes too."""
        report = yield
        now = tree_cpu_s()
        # Processes that ended without a waiting parent are missing from the sum.
        report.cpu_s = max(0.0, now - self._before) if self._before else 0.0
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to its file."""
        of, cpu_s = self._files[report.nodeid.partition("::")[0]], getattr(report, "cpu_s", 0.0)
        outcome: str = report.outcome
        rerun = outcome == "rerun"  # of pytest-rerunfailures
        of["tests"] += report.when == "call" and not rerun
        of["cpu_s"] += cpu_s
        of["wall_s"] += report.duration
        self._tests[report.nodeid] += cpu_s
        if rerun:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self._causes[report.nodeid] = (lines or [report.longreprtext[-200:]])[0][1:].strip()
        elif report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        if self._target is None or not self._files:
            return
        reruns = {test: why for test, why in self._causes.items() if test not in self._failed}
        dear = {test: s for test, s in self._tests.items() if s >= DEAR_S}
        self._target.write_text(_text({"files": self._files, "dear": dear, "reruns": reruns}))


def _text(run: dict[str, Any]) -> str:
    """One file or test a line, so that the difference of two records reads as a table."""
    parts = []
    for name, of in run.items():
        rows = (f"  {json.dumps(key)}: {json.dumps(_rounded(of[key]))}" for key in sorted(of))
        parts.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }" if of else f' "{name}": {{}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 1) if isinstance(value, float) else value


def tiers(files: dict[str, dict[str, Any]]) -> dict[str, float]:
    """CPU seconds by folder of ``tests``; the engine's tests are two tiers of their own."""
    sums: defaultdict[str, float] = defaultdict(float)
    for file, of in files.items():
        parts = file.split("/")[1:-1]
        sums["/".join(parts[: 2 if "engine" in parts[1:2] else 1])] += of["cpu_s"]
    return dict(sums)


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterable[tuple[float, str]]:
    """CPU seconds that a file of ``new`` costs more than in ``old``, and a line that says so."""
    for file, of in new.items():
        before = old.get(file, {"cpu_s": 0.0, "tests": 0})
        more = of["cpu_s"] - before["cpu_s"]
        if abs(more) >= max(NOISE_S, NOISE_SHARE * before["cpu_s"]):
            was = f"{before['cpu_s']:6.1f} -> {of['cpu_s']:6.1f} CPU s"
            yield more, f"{more:+7.1f}  {was}  {before['tests']:3} -> {of['tests']:3} tests  {file}"


def diff(run: dict[str, Any], record: dict[str, Any]) -> str:
    """The report: dearer and cheaper files, sums by tier, reruns."""
    old = {file: of for file, of in record["files"].items() if file in run["files"]}
    lines = [line for _, line in sorted(changes(record["files"], run["files"]), reverse=True)]
    before, after = tiers(old), tiers(run["files"])
    lines += [f"{tier:20} {before.get(tier, 0):7.0f} -> {after[tier]:7.0f} CPU s" for tier in after]
    total = f"{sum(before.values()):7.0f} -> {sum(after.values()):7.0f} CPU s"
    lines.append(f"{'in all':20} {total}")
    lines += [f"passed only when run again: {test}: {why}" for test, why in run["reruns"].items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """``diff`` or ``keep``."""
    if not arguments or arguments[0] not in ("diff", "keep") or len(arguments) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(arguments[1]) if arguments[1:] else RUN
    try:
        run = json.loads(source.read_text())
    except FileNotFoundError:
        print(f"durations: no {source}: make test writes it", file=sys.stderr)
        return 1
    record = json.loads(RECORD.read_text())
    if arguments[0] == "diff":
        print(diff(run, record))
        return 0
    ran = frozenset(run["files"])
    for part, of in run.items():
        kept = {key: value for key, value in record[part].items() if _kept(key, ran)}
        run[part] = kept | of
    RECORD.write_text(_text(run))
    return 0


def _kept(name: str, ran: Collection[str]) -> bool:
    """Whether the record's entry for a file or test stays: the run knows nothing newer of it."""
    file = name.partition("::")[0]
    return file not in ran and (ROOT / file).exists()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
