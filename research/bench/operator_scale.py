"""The operator on many InferenceServices, on a real control plane of this machine.

    python -m bench.operator_scale                    # 100, 1,000, then 5,000
    python -m bench.operator_scale --add 5000         # one of them, beside what there is

The figures are those of 1,000, and some of 5,000 by their own names; ``samples`` has one row for
each size, for docs/scale.md. It brings its control planes up and takes them down again. (It is not
called ``operator.py``: beside the other benchmarks that would shadow the standard library's module
of that name.)

``floor_ratio`` is ``all_reconciled_s`` over the time that a bare client needs for the same objects
on the same control plane, once the operator has ended: to create the services, to apply what is
rendered of each, and to write a status of the same size. It sends as many requests at once as the
operator has workers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.control_plane import (
    NAMESPACE,
    Admin,
    all_made,
    control_plane,
    cpu_s,
    create,
    requests,
    rss_mib,
    settled,
    until,
    writes,
)
from bench.result import RESULTS, publish
from plimsoll_api.names import API_VERSION
from plimsoll_operator.config import Config
from plimsoll_operator.kinds import KINDS_BY_NAME, SERVICE
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images, render_objects
from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.queue import RateLimit
from tests.lab.operator import Operator

CHANGES = 50
STEADY_S = 30.0
PROBE_S = 0.2
LIMIT_S = 1500.0
SIZES = (100, 1000, 5000)
TABLE = 1000
OF_LARGER = (
    "rss_mib",
    "steady_requests_per_s",
    "steady_writes_count",
    "restart_writes_count",
    "restart_rss_mib",
    "restart_probe_max_s",
    "floor_ratio",
)
FLAGS = ("--qps", "1000", "--burst", "2000", "--scrape", "15")
IMAGES = Images("engine:1", "supervisor:1")
CONFIG_MAPS = KINDS_BY_NAME["ConfigMap"]


Row = dict[str, float | int]


def tell(figures: Row, **more: float) -> None:
    """Takes figures in, and prints them as they come: a run takes minutes."""
    figures |= more
    for name, value in more.items():
        print(f"{name}: {value}", file=sys.stderr, flush=True)


async def measure(lab: Any, account: Path, services: int) -> Row:
    """All figures of the table for ``services``; each is told as it comes."""
    figures: Row = {"services_count": services}
    operator = Operator(account, NAMESPACE, *FLAGS)
    try:
        async with Admin.connect(lab) as admin:
            began = time.monotonic()
            await create(admin, names(0, services))
            tell(figures, create_s=time.monotonic() - began)
            await until(lambda: all_made(admin, services), "all children and status", LIMIT_S)
            tell(figures, all_reconciled_s=time.monotonic() - began)
            await settled(operator)
            tell(figures, rss_mib=rss_mib(operator))
            tell(figures, **await steady(operator))
            tell(figures, **await changes(admin, services))
            await settled(operator)
            operator.stop()
            operator = Operator(account, NAMESPACE, *FLAGS)
            tell(figures, **await restarted(operator))
            operator.stop()
            gone = f"{CONFIG_MAPS.path(NAMESPACE, name(0))}-supervisor"
            await admin.call("DELETE", gone)
            operator = Operator(account, NAMESPACE, *FLAGS)
            wanted = services

            async def repaired() -> bool:
                # The namespace has one of its own, with the cluster's certificates.
                return await admin.count(CONFIG_MAPS) >= wanted + 1

            tell(figures, drift_repaired_s=await until(repaired, "drift is repaired", LIMIT_S))
            operator.stop()
            tell(figures, bare_s=await bare(admin, account, services))
            tell(figures, floor_ratio=figures["all_reconciled_s"] / figures["bare_s"])
    finally:
        operator.stop()
    return figures


async def bare(admin: Admin, account: Path, services: int) -> float:
    """Seconds that a client without any decision needs for what the operator made."""
    kept = (await admin.call("GET", SERVICE.path(NAMESPACE, name(0))))["status"]
    api = await Api.connect(str(account), 30.0, RateLimit(1000.0, 2000))
    limit = asyncio.Semaphore(Config.workers)
    bare_names = [f"b{index:05d}" for index in range(services)]

    async def one(wanted: str) -> None:
        async with limit:
            item = await admin.call("GET", SERVICE.path(NAMESPACE, wanted))
            for child in render_objects(parse_service(item), IMAGES):
                await api.apply_new(KINDS_BY_NAME[child["kind"]], child)
            about = {"name": wanted, "namespace": NAMESPACE}
            made = {"apiVersion": API_VERSION, "kind": SERVICE.kind, "metadata": about}
            await api.apply(SERVICE, made | {"status": kept}, "status")

    try:
        began = time.monotonic()
        await create(admin, bare_names)
        await asyncio.gather(*map(one, bare_names))
        return time.monotonic() - began
    finally:
        await api.close()


async def restarted(operator: Operator) -> Row:
    """What a new operator writes and needs until it rests, and the longest that a probe waited."""
    waits, sizes = [0.0], [0.0]

    async def probe() -> None:
        while True:
            began = time.monotonic()
            await asyncio.to_thread(operator.healthy)
            waits.append(time.monotonic() - began)
            sizes.append(rss_mib(operator))
            await asyncio.sleep(PROBE_S)

    probing = asyncio.create_task(probe())
    await settled(operator)
    probing.cancel()
    return {
        "restart_writes_count": int(writes(operator)),
        "restart_rss_mib": max(sizes),
        "restart_probe_max_s": max(waits),
    }


async def steady(operator: Operator) -> Row:
    """Requests, writes and processor time while nothing changes."""
    before = requests(operator), writes(operator), cpu_s(operator)
    await asyncio.sleep(STEADY_S)
    return {
        "steady_cpu_ratio": (cpu_s(operator) - before[2]) / STEADY_S,
        "steady_requests_per_s": (requests(operator) - before[0]) / STEADY_S,
        "steady_writes_count": int(writes(operator) - before[1]),
    }


async def changes(admin: Admin, services: int) -> Row:
    """Time from the answer to a change of one service until its ConfigMap changed."""
    changed: dict[str, float] = {}

    async def look() -> None:
        async for event in admin.watch(CONFIG_MAPS):
            changed[event["object"]["metadata"]["name"]] = time.monotonic()

    watching = asyncio.create_task(look())
    await asyncio.sleep(1.0)
    took = []
    for turn in range(CHANGES):
        which = name(turn * services // CHANGES)
        patch = {"spec": {"memory": {"host": {"growthBudget": f"{turn + 1}Mi"}}}}
        sent = time.monotonic()
        await admin.call("PATCH", SERVICE.path(NAMESPACE, which), patch, "merge-patch+json")

        async def seen(which: str = which, sent: float = sent) -> bool:
            return changed.get(f"{which}-supervisor", 0.0) > sent

        deadline = time.monotonic() + 30.0
        while not await seen() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        took.append(changed[f"{which}-supervisor"] - sent)
        await asyncio.sleep(0.1)
    watching.cancel()
    return {"change_p50_s": statistics.median(took), "change_max_s": max(took)}


def names(first: int, last: int) -> list[str]:
    return [name(index) for index in range(first, last)]


def name(index: int) -> str:
    return f"s{index:05d}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", type=int, nargs="*", default=SIZES, metavar="SERVICES")
    parser.add_argument("--add", action="store_true", help="keep the other sizes of the last run")
    given = parser.parse_args()
    path = RESULTS / "operator.json"
    earlier = json.loads(path.read_bytes())["samples"] if given.add and path.exists() else []
    rows = {int(row["services_count"]): row for row in earlier}
    for size in given.sizes:
        rows[size] = run(size)
        publish("operator", figures(rows), samples=[rows[key] for key in sorted(rows)])


def figures(rows: dict[int, Row]) -> Row:
    """Those of the table's size, or of the largest below it, and some of the larger ones."""
    base = max((size for size in rows if size <= TABLE), default=min(rows))
    found = dict(rows[base])
    for size in (size for size in rows if size > base):
        # A row of an earlier release may lack some.
        known = {name: rows[size][name] for name in OF_LARGER if name in rows[size]}
        found |= {name.replace("_", f"_{size}_", 1): known[name] for name in known}
    return found


def run(services: int) -> Row:
    """One row, on a control plane of its own."""
    with control_plane() as (lab, account):
        return asyncio.run(measure(lab, account, services))


if __name__ == "__main__":
    main()
