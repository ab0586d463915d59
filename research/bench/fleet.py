"""A fleet under one correlated leak, on a real control plane: does it stay orderly?

    python -m bench.fleet                              # 2,000 supervisors for two minutes
    python -m bench.fleet --services 10 --replicas 5 --seconds 30

Each simulated supervisor is the real recorder and the real slot Leases; what a governor would
decide follows a script (open, confirmed, trimmed, waits for its slot, restarts, verified), begun at
random within ``SPREAD_S``. The operator, the incidents, the Leases and the pods are real; the pods
are on no node.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.control_plane import NAMESPACE, Admin, control_plane, service, until
from bench.result import publish
from plimsoll_api.incident_record import Attribution, Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.names import SERVICE_LABEL
from plimsoll_api.supervision import RestartBudget
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_operator.kinds import INCIDENT, KINDS_BY_NAME, LEASE, POD, SERVICE
from plimsoll_sidecar.act.slots import LeaseSlots
from plimsoll_sidecar.clients.kube import KubeClient, KubeError
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.publisher import Publisher
from tests.lab.operator import Operator

WORKERS = 24
SPREAD_S = 20.0
LIMIT = 20
HOLDER = "plimsoll-operator"
POLICY = RestartBudget(count=1000, window_s=3600.0)
SEGMENT = "python_objects"


@dataclass
class Fleet:
    """Supervisors whose turn comes at a time, worked through by a few threads."""

    clients: list[KubeClient]
    due: list[tuple[float, int, Iterator[float]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    failures: Counter[str] = field(default_factory=Counter)
    restarts: int = 0

    def work(self) -> None:
        numbers = itertools.count(1 << 20)
        while not self.stop.is_set():
            with self.lock:
                ready = bool(self.due) and self.due[0][0] <= time.monotonic()
                turn = heapq.heappop(self.due) if ready else None
            if turn is None:
                self.stop.wait(0.02)
                continue
            _, number, story = turn
            try:
                delay = next(story)
            except StopIteration:
                continue
            except KubeError as error:
                self.failures[str(error.status)] += 1
                continue
            with self.lock:
                entry = (time.monotonic() + delay, number + next(numbers), story)
                heapq.heappush(self.due, entry)


def life(fleet: Fleet, client: KubeClient, owner: ServiceRef, pod: str) -> Iterator[float]:
    """One supervisor: seconds until its next step. A failed write is tried again."""
    dice = random.Random(pod)
    recorder = Publisher(client, owner, pod)
    slots = LeaseSlots(client, NAMESPACE, (f"{owner.name}-restart-0",), pod)
    incident = Incident(
        name=f"{pod}-leak",
        kind=IncidentKind.HOST_GROWTH,
        epoch="a:1",
        opened_at=time.time(),
        attribution=Attribution(segment=SEGMENT, bytes=1 << 28, confidence=0.99),
    )

    def told(phase: IncidentPhase) -> Iterator[float]:
        incident.phase = phase
        while True:
            try:
                recorder.publish(incident)
                return
            except KubeError as error:
                if not error.is_transient:
                    raise
                fleet.failures[str(error.status)] += 1
                yield dice.uniform(1.0, 3.0)

    for phase in (
        IncidentPhase.OPEN,
        IncidentPhase.CONFIRMED,
        IncidentPhase.TRIMMING,
        IncidentPhase.AWAITING_SLOT,
    ):
        yield from told(phase)
        yield dice.uniform(1.0, 3.0)
    while slots.acquire(incident.name, POLICY) is not None:
        yield dice.uniform(4.0, 8.0)
    for phase in (IncidentPhase.DRAINING, IncidentPhase.RESTARTING, IncidentPhase.VERIFYING):
        yield from told(phase)
        yield dice.uniform(0.5, 1.5)
    incident.reason, incident.ended_at = Reason.WORKER_RESTART, time.time()
    yield from told(IncidentPhase.RESOLVED)
    slots.release_all_slots()
    fleet.restarts += 1


@dataclass
class Watcher:
    """The most slots that were in use at once: in the cluster, and of one service."""

    holders: dict[str, str] = field(default_factory=dict)
    most: int = 0

    async def run(self, admin: Admin) -> None:
        async for event in admin.watch(LEASE):
            item = event["object"]
            holder = (item.get("spec") or {}).get("holderIdentity") or ""
            self.holders[item["metadata"]["name"]] = "" if holder == HOLDER else holder
            self.most = max(self.most, sum(bool(one) for one in self.holders.values()))


async def measure(lab: Any, account: Any, given: argparse.Namespace) -> dict[str, Any]:
    operator = Operator(
        account, NAMESPACE, "--qps", "1000", "--burst", "2000", "--scrape", "60",
        "--max-disruptions", str(LIMIT),
    )  # fmt: skip
    wanted = given.services * given.replicas
    pki = lab.plane.pki
    server = f"https://127.0.0.1:{lab.plane.api_port}"
    files = [pki / name for name in ("ca.crt", "admin.crt", "admin.key")]
    fleet = Fleet([KubeClient(server, None, *files) for _ in range(WORKERS)])
    threads = [threading.Thread(target=fleet.work) for _ in range(WORKERS)]
    try:
        async with Admin.connect(lab) as admin:
            template = {"spec": {"nodeSelector": {"plimsoll.dev/no-node": "true"}}}
            for index in range(given.services):
                body = service(f"s{index:05d}", replicas=given.replicas, podTemplate=template)
                await admin.call("POST", SERVICE.path(NAMESPACE), body)

            async def there() -> bool:
                return bool(await admin.count(POD) >= wanted)

            await until(there, "all pods exist", 600)
            services = await admin.call("GET", SERVICE.path(NAMESPACE))
            uids = {one["metadata"]["name"]: one["metadata"]["uid"] for one in services["items"]}
            pods = (await admin.call("GET", POD.path(NAMESPACE)))["items"]
            watcher = Watcher()
            watching = asyncio.create_task(watcher.run(admin))
            began = time.monotonic()
            for number, pod in enumerate(pods[:wanted]):
                name = pod["metadata"]["labels"][SERVICE_LABEL]
                owner = ServiceRef(name=name, namespace=NAMESPACE, uid=uids[name])
                client = fleet.clients[number % WORKERS]
                story = life(fleet, client, owner, pod["metadata"]["name"])
                heapq.heappush(fleet.due, (began + random.uniform(0, SPREAD_S), number, story))
            for thread in threads:
                thread.start()
            answers, named_s = await observed(admin, given, began)
            fleet.stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            watching.cancel()
            return await summed_up(admin, given, fleet, watcher, answers, named_s)
    finally:
        fleet.stop.set()
        operator.stop()


async def observed(
    admin: Admin, given: argparse.Namespace, began: float
) -> tuple[list[float], dict[str, float]]:
    """Times of a get, and when each service's bad revision was named."""
    answers: list[float] = []
    named: dict[str, float] = {}
    looked = 0.0
    while (now := time.monotonic()) - began < given.seconds:
        await admin.call("GET", KINDS_BY_NAME["Deployment"].path(NAMESPACE, "s00000"))
        answers.append(time.monotonic() - now)
        if now - looked > 5.0 and len(named) < given.services:
            looked = now
            for item in (await admin.call("GET", SERVICE.path(NAMESPACE)))["items"]:
                if (item.get("status") or {}).get("suspectRevision"):
                    named.setdefault(item["metadata"]["name"], now - began)
        await asyncio.sleep(0.1)
    return sorted(answers), named


async def summed_up(
    admin: Admin,
    given: argparse.Namespace,
    fleet: Fleet,
    watcher: Watcher,
    answers: list[float],
    named: dict[str, float],
) -> dict[str, Any]:
    items = (await admin.call("GET", INCIDENT.path(NAMESPACE)))["items"]
    pods = Counter(item["spec"]["pod"] for item in items)
    return {
        "supervisors_count": given.services * given.replicas,
        "services_count": given.services,
        "observed_s": given.seconds,
        "incidents_recorded_count": len(items),
        "incidents_twice_count": sum(count > 1 for count in pods.values()),
        "restarts_count": fleet.restarts,
        "breaker_limit_count": LIMIT,
        "slots_held_most_count": watcher.most,
        "breaker_exceeded_count": max(0, watcher.most - LIMIT),
        "revisions_named_count": len(named),
        "revision_named_first_s": min(named.values(), default=None),
        "revision_named_last_s": max(named.values(), default=None),
        "get_p50_s": answers[len(answers) // 2],
        "get_p99_s": answers[int(len(answers) * 0.99)],
        "refused_writes_count": sum(fleet.failures.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=200, metavar="N")
    parser.add_argument("--replicas", type=int, default=10, metavar="N")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S")
    given = parser.parse_args()
    with control_plane() as (lab, account):
        figures = asyncio.run(measure(lab, account, given))
    publish("fleet", figures)


if __name__ == "__main__":
    main()
