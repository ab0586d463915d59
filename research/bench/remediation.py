"""Remediations under load: two replicas that leak, restarted again and again. Does a client notice?

    python -m bench.remediation                            # 50 restarts, 100,000 requests
    python -m bench.remediation --minutes 9 --no-cluster   # what fits; slots without a cluster

Two of our engines on the CPU, each beside its own supervisor in mode ``Recover``, share one restart
slot: a Lease on a real API server, taken and released by the real code; incidents go there, too.
Each worker leaks by the clock, in every epoch, so that it is restarted whenever its leak budget is
spent, however many requests this machine manages meanwhile. Clients balance short requests (1 to 4
tokens) and streams of 128 tokens over the replicas that say that they are ready, and compare each
stream's text with an undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.remediation_clients import Balancer, Target
from bench.result import publish
from leaklab import replicas
from leaklab.replicas import Policy
from plimsoll_api.incident_record import IncidentRecord, Reason
from plimsoll_cli.demo.evidence import find_pauses, find_restarts
from plimsoll_cli.demo.streams import ReplyState, collect_reference_texts
from plimsoll_cli.figures import compute_percentile
from plimsoll_cli.local import model, runner
from plimsoll_cli.local.plan import Plan

SERVICE = "leaky"
REPLICAS = 2
SHORT, STREAMS = 16, 6
POLL_S = 1.0
POLICY = Policy(
    growth_mib=64, warmup="0s", stall="20s", restarts=500, interval_s=0.25,
    ladder=("Trim", "WorkerRestart"),
)  # fmt: skip
FLAGS = ("--max-num-seqs=32", "--max-queued=256", "--max-model-len=512", "--num-blocks=1024")


def plans(root: Path, tiny: Path, leak: str, service: Any) -> list[Plan]:
    fault = f"mmap_growth:bytes_per_s={leak},epochs=all"
    made = []
    for number in range(REPLICAS):
        folder = root / f"r{number}"
        plan = replicas.engine(SERVICE, folder, tiny, POLICY, os.environ, fault, FLAGS)
        made.append(plan if service is None else service.joined(plan, f"{SERVICE}-{number}"))
    return made


async def texts(root: Path, tiny: Path) -> list[str]:
    """What each stream says when nothing disturbs it."""
    sound = replicas.engine("sound", root / "sound", tiny, POLICY, os.environ, flags=FLAGS)
    async with runner.run_replica(sound, print):
        return await collect_reference_texts(sound.serving_url, "tiny")


async def measure(given: argparse.Namespace, root: Path, service: Any) -> dict[str, Any]:
    tiny = root / "tiny"
    await model.generate_tiny_checkpoint(tiny)
    known = await texts(root, tiny)
    made = plans(root, tiny, given.leak, service)
    balancer = Balancer([Target(plan.serving_url, "tiny") for plan in made], known)
    troubles: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        for plan in made:
            await stack.enter_async_context(runner.run_replica(plan, troubles.append))
        began = time.monotonic()
        clients = asyncio.create_task(balancer.run(SHORT, STREAMS))
        while time.monotonic() - began < 60 * given.minutes and not clients.done():
            await asyncio.sleep(POLL_S)
            done = len(cured(made))
            if done >= given.remediations and balancer.answered >= given.requests:
                break
        balancer.finish()
        await clients
        took = time.monotonic() - began
        found = [replicas.journal(plan) for plan in made]
    recorded, counted = (
        (None, None)
        if service is None
        else (await asyncio.to_thread(service.recorded), await asyncio.to_thread(service.restarts))
    )
    return summed_up(balancer, found, took, recorded, counted, troubles)  # fmt: skip


def cured(made: Sequence[Plan]) -> list[IncidentRecord]:
    found = [incident for plan in made for incident in replicas.journal(plan)]
    return [incident for incident in found if incident.reason is Reason.WORKER_RESTART]


def summed_up(
    balancer: Balancer,
    found: list[list[IncidentRecord]],
    took: float,
    recorded: list[dict[str, Any]] | None,
    counted: int | None,
    troubles: list[str],
) -> dict[str, Any]:
    windows = [find_restarts(one) for one in found]
    met = [
        gap
        for target, its in zip(balancer.targets, windows, strict=True)
        for gap in find_pauses(target.replies, its)
    ]
    replies, incidents = balancer.replies, [one for its in found for one in its]
    ends = [reply.state for reply in replies]
    failed = sum(n for what, n in balancer.failures.items() if not what.startswith("stream broken"))
    everyone = sorted(window for its in windows for window in its)
    return {
        "figures": {
            "requests_count": balancer.answered
            + len(replies)
            + failed
            - ends.count(ReplyState.FAILED),
            "requests_failed_count": failed,
            "streams_count": len(replies),
            "streams_broken_count": ends.count(ReplyState.BROKEN),
            "texts_different_count": balancer.different(),
            "remediations_count": len(everyone),
            "incidents_resolved_count": sum(
                one.reason is Reason.WORKER_RESTART for one in incidents
            ),
            "both_restarting_count": sum(b[0] < a[1] for a, b in pairwise(everyone)),
            "streams_carried_count": len(met),
            "pause_p50_s": compute_percentile(met, 0.5),
            "pause_p99_s": compute_percentile(met, 0.99),
            "pause_max_s": max(met, default=None),
            "restart_p50_s": compute_percentile([end - begin for begin, end in everyone], 0.5),
            "answer_p50_s": compute_percentile(balancer.waits, 0.5),
            "answer_p99_s": compute_percentile(balancer.waits, 0.99),
            "unready_polls_count": balancer.unready,
            "duration_s": took,
            "incidents_in_cluster_count": len(recorded) if recorded is not None else None,
            "restarts_in_lease_count": counted,
        },
        "samples": {
            "slots": "a Lease on a real API server" if recorded is not None else "local",
            "failures": dict(balancer.failures.most_common(20)),
            "troubles": troubles[:20],
            "endings": sorted({f"{one.kind} {one.phase} {one.reason}" for one in incidents}),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--remediations", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="the most it may take")
    parser.add_argument("--leak", default="4Mi", help="what each worker leaks in a second")
    parser.add_argument("--no-cluster", action="store_true", help="slots without a Lease")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rem-") as name:
        root = Path(name)
        if given.no_cluster:
            lab: Any = nullcontext(None)
        else:
            from bench.remediation_cluster import cluster

            lab = cluster(SERVICE, root / "account")
        with lab as service:
            done = asyncio.run(measure(given, root, service))
    publish("remediation", done["figures"], done["samples"])


if __name__ == "__main__":
    main()
