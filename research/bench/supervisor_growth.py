"""A real supervisor that takes sample after sample without sleeping: what each of them leaves.

    python -m bench.supervisor_growth --config FILE --run-dir DIR --state-dir DIR

Everything is the supervisor's own but the clock, which goes on by one second a sample: rings and
windows of hours fill as they would in a pod. The clock stands still while the engine serves a
request, and until its status tells of it: a request that lasted for some hundred samples would
be a stall, and a pod has no stall every hour. ``supervisor_cost.py`` sends that request. This
process prints ``serve`` for it and waits for a line, and prints its own anonymous memory in bytes
after every ``--every`` samples, so that its memory is the supervisor's alone. At last it prints
one JSON object: ``took_s`` without those times.
"""

from __future__ import annotations

import json
import os
import sys
import time

from plimsoll_sidecar.main import build_supervisor, create_parser
from plimsoll_sidecar.signals.resident_memory import read_resident_memory

SCRAPE_EVERY = 15
SERVE_EVERY = 400
"""Samples from one request to the next."""
BEGIN = 1_700_000_000.0
SERVE = "serve"


def main() -> None:
    parse = create_parser()
    parse.add_argument("--samples", type=int, default=100_000)
    parse.add_argument("--every", type=int, default=100)
    arguments = parse.parse_args()
    now = 0.0
    supervisor, metrics = build_supervisor(arguments, None, clock=lambda: now)
    took_s = 0.0
    for number in range(arguments.samples):
        now = float(number)
        if number % SERVE_EVERY == 0:
            print(SERVE, flush=True)
            sys.stdin.readline()
        began = time.monotonic()
        supervisor.tick(BEGIN + now)
        if number % SCRAPE_EVERY == 0:
            metrics.render()
        took_s += time.monotonic() - began
        if number % arguments.every == 0:
            own = read_resident_memory(os.getpid())
            assert own is not None
            print(own.anon, flush=True)
    json.dump({"took_s": took_s}, sys.stdout)


if __name__ == "__main__":
    main()
