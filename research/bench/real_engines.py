"""Real engines under the unmodified supervisor: what it finds, how soon, and what it costs.

    python -m bench.real_engines --name real-engines-h200 --peer vllm-0.24.0-cuda --seconds 1300

    python -m bench.real_engines --name real-engines --peer sglang-0.5.23 --cases pair --rows FOLDER

Without a device the figures of each engine begin with its type, in one file for all. Run one or two
cases at a time there: a start takes a minute of both cores.

Every case has an engine of its own (``real_engines_cases.py``), a probe in it, a supervisor beside
it and clients on loopback; all of them use one device at the same time. Only the pairs that measure
the probe have it to themselves, in the last ``--alone`` seconds: the other engines have ended by
then.

- ``healthy_*``: service under load with nothing injected, added up over all engines.
- ``whole_device_*``: the same of engines whose supervisor took the device, which others used too,
  for its engine's own: there the others' memory is an orphan. No case does so any more.
- ``probe_loss_ratio``: of throughput, while a supervisor asks the probe every second; with the ends
  of the 95 % interval of the pairs' mean (``real_engines_probe_cost.py`` has the method).
- ``*_confirm_s``: the slowest, from the cause to the confirmation. Leaks are of 2 MiB/s with a
  budget of 256 MiB; ``second_*`` are of later lives of the same replica. Stalls are SIGSTOP to
  EngineCore after five minutes of service, ``young_*`` after the first one and
  ``first_minute_*`` within it, where there is no history yet.
- ``frontend_stall_*``: SIGSTOP to the API server instead.
- ``diagnosis_lost_s``: of a request in which all processes are trimmed and diagnosed, beside one in
  which they are not (``real_engines_diagnosis.py``), with the ends of the 95 % interval;
  ``diagnosed_gap_s`` and ``diagnosed_health_s`` are the longest waits for a token and for
  ``/health``, and ``diagnosis_grown_bytes`` what the processes kept of all diagnoses.
- ``staircase_*``: device memory that grows in steps up to half of the budget, and then stays.
- ``requests_failed_count``: of clients of two replicas behind a balancer, of which one leaks and is
  restarted again and again (cases ``pair``); ``leak_restarts_count`` says how often.
- ``segment_and_process_right_ratio``: of the leaks that were confirmed, with the probe.
- ``orphan_processes_count``: processes of the engine that outlived a killed one by two minutes.

``--rows FOLDER`` keeps what each case has found so far; ``--publish`` makes the result of that, and
with ``--add`` of the runs that the result has already, too: no run is lost. A row of an earlier
run that shows a defect mended since stays there with ``set_apart``: why no figure has it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.real_engines_cases import CASES, USUAL, run
from bench.real_engines_figures import figures, load_average, passed
from bench.real_engines_pair import LAPS, PAIRS, pair
from bench.real_engines_probe_cost import METHOD, Pairs
from bench.real_engines_replica import Book
from bench.result import RESULTS, command
from plimsoll_cli.figures import describe_machine, find_commit, make_result
from tests.conformance import table
from tests.conformance.peers import ON_DEVICE, PEERS, Peer

FIRST = {peer.type: peer for peer in reversed(PEERS.values())}
"""On the CPU one version of each type: its figures begin with the type."""
ALL_PEERS = {peer.name: peer for peer in FIRST.values()} | ON_DEVICE
Figures = dict[str, float | int | None]
ABOUT = ("date", "machine", "commit", "command")
END_S = 240.0
"""For the cases to end their engines."""


def main() -> int:
    parser = _parser()
    flags = parser.parse_args()
    known = ("frontend", *ALL_PEERS[flags.peer].parts)
    if unknown := set(flags.kill) - set(known):
        parser.error(f"--kill: {flags.peer} has no {', '.join(unknown)}; it has {', '.join(known)}")
    flags.rows.mkdir(parents=True, exist_ok=True)
    if flags.case in PAIRS:
        probe, peer = flags.rows / "probe", ALL_PEERS[flags.peer]
        pair(flags.case, peer, flags.rows, probe, flags.ends_at, flags.laps, tuple(flags.kill))
        return 0
    if flags.case:
        beside = tuple(name for name in flags.cases if name != flags.case)
        book = Book(flags.rows / f"{flags.case}.jsonl", beside, flags.ends_at)
        pairs = Pairs(flags.pairs)
        folder = flags.rows / flags.case
        run(flags.case, ALL_PEERS[flags.peer], folder, flags.rows / "probe", book, pairs)
        return 0
    if flags.publish is None:
        _run_all(flags)
    folders = [flags.rows, *(flags.publish or [])]
    _publish(flags.name, ALL_PEERS[flags.peer], folders, flags.add)
    return 0


def _parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parse.add_argument("--name", default="real-engines")
    parse.add_argument("--peer", choices=list(ALL_PEERS), default=next(iter(ALL_PEERS)))
    parse.add_argument("--cases", nargs="+", choices=[*CASES, *PAIRS], default=USUAL)
    parse.add_argument("--seconds", type=float, default=1300.0)
    parse.add_argument("--alone", type=float, default=300.0, help="seconds for the pairs")
    parse.add_argument("--pairs", type=int, default=40, help="at most")
    parse.add_argument("--laps", type=int, default=LAPS, help="leak restarts of a pair, at most")
    parse.add_argument(
        "--kill", nargs="+", default=[], metavar="PART", help="that a pair kills, in turn; else all"
    )  # fmt: skip
    parse.add_argument("--rows", type=Path, required=True)
    parse.add_argument(
        "--publish", nargs="*", type=Path, metavar="FOLDER",
        help="what --rows has, and these of other runs; no new run",
    )  # fmt: skip
    parse.add_argument("--add", action="store_true", help="beside the runs that the result has")
    parse.add_argument("--case", choices=[*CASES, *PAIRS], help=argparse.SUPPRESS)
    parse.add_argument("--ends-at", type=float, default=0.0, help=argparse.SUPPRESS)
    return parse


def _run_all(flags: argparse.Namespace) -> None:
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": describe_machine(),
        "commit": find_commit(),
        "command": shlex.join(["python", *_said(flags.rows)]),
    }
    (flags.rows / "run.json").write_text(json.dumps(about))
    probe = str(flags.rows / "probe")
    subprocess.run([sys.executable, "-m", "plimsoll_probe.install", probe], check=True)
    ends_at = time.time() + flags.seconds
    started = []
    for case in flags.cases:
        till = ends_at - (0 if case == "probe-cost" else flags.alone)
        argv = [sys.executable, *command(), f"--case={case}", f"--ends-at={till}"]
        with (flags.rows / f"{case}.out").open("ab") as out:
            started.append(subprocess.Popen(argv, stdout=out, stderr=out))
    for process in started:
        try:
            process.wait(max(1.0, ends_at + END_S - time.time()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)


def _said(rows: Path) -> list[str]:
    """The command line; where its rows are is of this machine alone."""
    return ["ROWS" if word == str(rows) else word for word in command()]


def _publish(name: str, peer: Peer, folders: list[Path], add: bool) -> None:
    """One result of one or more runs, with the machine, date and commit of the newest: they may
    have been elsewhere. What passed goes into the table of conformance, each with its newest
    run."""
    path = RESULTS / f"{name}.json"
    runs, rows, notes = _published(path, peer) if add else ([], [], [])
    for number, folder in enumerate(folders, len(runs)):
        runs.append(json.loads((folder / "run.json").read_text()))
        of_it = [
            json.loads(line) | {"run": number}
            for file in sorted(folder.glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        if load := load_average(of_it):
            runs[-1]["load_average"] = load
        rows += of_it
    newest = max(runs, key=lambda run: str(run["date"]))
    about = {key: newest[key] for key in ABOUT if newest.get(key) is not None}
    samples: dict[str, Any] = {"notes": notes} if notes else {}
    found, samples = figures(rows), samples | {"runs": runs, "probe_method": METHOD, "rows": rows}
    if peer.name not in ON_DEVICE:
        found, samples = _beside_others(path, peer, found, samples)
    whole = make_result(name, found, [], samples) | about
    path.write_text(json.dumps(whole, indent=1) + "\n")
    sys.stdout.write(json.dumps(whole["figures"], indent=1) + "\n")
    version = peer.version
    if peer.name in ON_DEVICE:
        version += f", {', '.join(dict.fromkeys(about['machine']['devices']))}"
    for case, seconds, told in passed(rows):
        ran = table.Ran(peer.type.value, version, case, seconds, told)
        run = _newest(case, runs, rows)
        table.write(ran, {"date": run["date"][:10], "commit": run["commit"][:7]})


def _published(path: Path, peer: Peer) -> tuple[list[Any], list[dict[str, Any]], list[str]]:
    """Runs and rows of ``peer`` that the result has, and what it says of them."""
    samples = json.loads(path.read_text())["samples"]
    mine = samples if peer.name in ON_DEVICE else samples.get(peer.name, {"runs": [], "rows": []})
    return list(mine["runs"]), list(mine["rows"]), list(mine.get("notes", []))


def _newest(case: str, runs: list[Any], rows: list[dict[str, Any]]) -> Any:
    """The newest run in which ``case`` passed; the first where no run alone has it."""
    with_it = [
        run
        for number, run in enumerate(runs)
        if case in {name for name, *_ in passed([row for row in rows if row["run"] == number])}
    ]
    return max(with_it, key=lambda run: run["date"], default=runs[0])


def _beside_others(
    path: Path, peer: Peer, found: Figures, samples: dict[str, Any]
) -> tuple[Figures, dict[str, Any]]:
    """Figures and samples of one engine beside those of the others that the file has."""
    known = json.loads(path.read_text()) if path.exists() else {"figures": {}, "samples": {}}
    prefix = f"{peer.type.value}_"
    others = {key: v for key, v in known["figures"].items() if not key.startswith(prefix)}
    mine = {f"{prefix}{key}": value for key, value in found.items()}
    return others | mine, known["samples"] | {peer.name: samples}


if __name__ == "__main__":
    sys.exit(main())
