"""A real supervisor that takes sample after sample without sleeping: what each of them leaves.

    python -m bench.supervisor_growth --port PORT --config FILE --run-dir DIR --state-dir DIR

Everything is the supervisor's own but the clock, which goes on by one second a sample: rings and
windows of hours fill as they would in a pod. The clock stands still while the engine serves a
request, and until its status tells of it: a request that lasted for some hundred samples would
be a stall, and a pod has no stall every hour. Prints one JSON object: ``took_s`` without those
times, and its own anonymous memory after every ``--every`` samples.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request

from plimsoll_sidecar.main import build, parser
from plimsoll_sidecar.signals.process.resident_memory import resident

SCRAPE_EVERY = 15
SERVE_EVERY = 400
"""Samples from one request to the next."""
TOLD_S = 1.2
"""Twice the time within which an engine's worker reports to its frontend, and a little."""
BEGIN = 1_700_000_000.0
BODY = {"model": "bench", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


def complete(port: int) -> None:
    """One short completion."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        answer.read()


def main() -> None:
    parse = parser()
    parse.add_argument("--port", type=int, required=True, help="that the engine serves at")
    parse.add_argument("--samples", type=int, default=100_000)
    parse.add_argument("--every", type=int, default=100)
    arguments = parse.parse_args()
    now = 0.0
    supervisor, metrics = build(arguments, None, clock=lambda: now)
    anon: list[int] = []
    took_s = 0.0
    for number in range(arguments.samples):
        now = float(number)
        if number % SERVE_EVERY == 0:
            complete(arguments.port)
            time.sleep(TOLD_S)
        began = time.monotonic()
        supervisor.tick(BEGIN + now)
        if number % SCRAPE_EVERY == 0:
            metrics.text()
        took_s += time.monotonic() - began
        if number % arguments.every == 0:
            own = resident(os.getpid())
            assert own is not None
            anon.append(own.anon)
    json.dump({"took_s": took_s, "anon_bytes": anon}, sys.stdout)


if __name__ == "__main__":
    main()
