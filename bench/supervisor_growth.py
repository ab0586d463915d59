"""A real supervisor that takes sample after sample without sleeping: what each of them leaves.

    python -m bench.supervisor_growth --config supervisor.json --run-dir DIR --state-dir DIR

Everything is the supervisor's own but the clock, which goes on by one second a sample: rings and
windows of hours fill as they would in a pod. Prints one JSON object: ``took_s`` and its own
anonymous memory after every ``--every`` samples.
"""

from __future__ import annotations

import json
import os
import sys
import time

from plimsoll_sidecar.main import build, parser
from plimsoll_sidecar.signals.process.resident_memory import resident

SCRAPE_EVERY = 15
BEGIN = 1_700_000_000.0


def main() -> None:
    parse = parser()
    parse.add_argument("--samples", type=int, default=100_000)
    parse.add_argument("--every", type=int, default=100)
    arguments = parse.parse_args()
    now = 0.0
    supervisor, metrics = build(arguments, None, clock=lambda: now)
    anon: list[int] = []
    began = time.monotonic()
    for number in range(arguments.samples):
        now = float(number)
        supervisor.tick(BEGIN + now)
        if number % SCRAPE_EVERY == 0:
            metrics.text()
        if number % arguments.every == 0:
            own = resident(os.getpid())
            assert own is not None
            anon.append(own.anon)
    json.dump({"took_s": time.monotonic() - began, "anon_bytes": anon}, sys.stdout)


if __name__ == "__main__":
    main()
