"""What keeping the books costs: sets of work with the worker's reports and audits, and without.

    python -m bench.ledger_cost --shape 06b --workload decode256 --name ledger-cost-h200

A worker reports its memory, the driver's figures and its ledger each half second, and is audited
when the supervisor asks, which is each few seconds at the most. Here both happen between the steps
of every second set of a pair, whose order alternates. ``cost_ratio`` is the lower quartile of the
times with the books over that of the times without, less one: a device's clock has steps, and the
lower quartiles are of the same one. ``report_p50_s`` and ``audit_p50_s`` are what one of each takes
on the host.
"""

from __future__ import annotations

import statistics
import time

import torch

from bench.engine import WORKLOADS, Bench, workload
from bench.result import arguments_of, publish
from bench.shapes import SHAPES
from plimsoll_api.admin import Role
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.device_memory import read_device_memory
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.process.collector import FullCollectionCounter
from plimsoll_engine.process.host_memory import PythonMemoryEstimator, measure_process_memory
from plimsoll_engine.worker.main import REPORT_INTERVAL_S

AUDIT_INTERVAL_S = 2.0


class Books:
    """The reports and audits of a worker, when they are due."""

    def __init__(self, bench: Bench) -> None:
        self.engine = bench.engine
        self.ledger = Ledger([bench.engine])
        self.python = PythonMemoryEstimator()
        self.collections = FullCollectionCounter()
        self.reports_s: list[float] = []
        self.audits_s: list[float] = []
        self.begin()

    def begin(self) -> None:
        self.next_report = self.next_audit = time.monotonic()

    def keep(self) -> None:
        begun = time.monotonic()
        if begun >= self.next_report:
            self.next_report = begun + REPORT_INTERVAL_S
            measure_process_memory(Role.WORKER, self.python, self.collections)
            read_device_memory(self.engine.runner.device)
            self.ledger.list_entries()
            self.reports_s.append(time.monotonic() - begun)
        begun = time.monotonic()
        if begun >= self.next_audit:
            self.next_audit = begun + AUDIT_INTERVAL_S
            _, _, findings = run_audit(self.engine, self.ledger)
            assert findings == [], findings
            self.audits_s.append(time.monotonic() - begun)


def quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def main() -> None:
    parser = arguments_of(__doc__, "ledger-cost")
    add = parser.add_argument
    add("--shape", default="06b", choices=SHAPES)
    add("--workload", default="decode256", choices=WORKLOADS)
    add("--pairs", type=int, default=12)
    add("--scale", type=float, default=1.0, help="below 1: a trial, not written")
    add("--budget", type=int, default=16_384, help="tokens of one step")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    bench = Bench(flags.shape, torch.device(flags.device), 0, flags.budget)
    requests = workload(flags.workload, 0, flags.scale).requests
    books = Books(bench)
    bench.run(requests, books.keep)  # warms up
    kept: list[float] = []
    plain: list[float] = []
    for number in range(flags.pairs):
        for with_books in (True, False) if number % 2 else (False, True):
            books.begin()
            seconds, _, _ = bench.run(requests, books.keep if with_books else None)
            (kept if with_books else plain).append(seconds)
    figures = {
        "cost_ratio": round(quartile(kept) / quartile(plain) - 1, 5),
        "pairs_count": flags.pairs,
        "plain_p50_s": round(statistics.median(plain), 4),
        "kept_p50_s": round(statistics.median(kept), 4),
        "report_p50_s": round(statistics.median(books.reports_s), 6),
        "audit_p50_s": round(statistics.median(books.audits_s), 6),
    }
    bench.close()
    samples = {"plain_s": plain, "kept_s": kept}
    if flags.scale == 1.0:
        publish(flags.name, figures, samples, folder=flags.out)
    else:
        print(figures)


if __name__ == "__main__":
    main()
