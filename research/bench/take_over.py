"""Two operators at many services on an API server that throttles: does ever more than one write?

    python -m bench.take_over                      # 5,000 services
    python -m bench.take_over --services 200

The leader is paused for longer than its Lease lasts and continues. Then its successor is killed.
Meanwhile, another client overloads the API server. The API server's audit log says who wrote what,
and when: each operator has a token of its own. The figures are among those of ``hostile.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.control_plane import NAMESPACE, Admin, all_made, create, end_by_signals, until
from bench.result import add
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.kinds import KINDS_BY_NAME, SERVICE
from tests.lab.kube import Kube
from tests.lab.lab import Lab, new_lab
from tests.lab.operator import Operator, operator_kubeconfig

SERVICES = 5000
LEASE = "operator"
ACCOUNT = "system:serviceaccount:plimsoll-system:plimsoll-operator"
CREDENTIAL = "authentication.kubernetes.io/credential-id"
IN_FLIGHT = ("--max-requests-inflight=16", "--max-mutating-requests-inflight=8")
"""Some 24 seats for all; the default of an API server is 600."""
FLOOD = 48
"""Requests of the other client that wait at any time, each for all ConfigMaps."""
CHANGES_PER_S = 4.0
SETTLED_S = DEFAULT_INTERVALS.lease
"""How long a leader leads before it is ended."""
PAUSE_S = DEFAULT_INTERVALS.lease + 10.0
LIMIT_S = 4500.0
"""5,000 services took more than 1,500 s to be made on two cores that did other work as well."""
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "users": [ACCOUNT],
         "verbs": ["create", "update", "patch", "delete"]},
        {"level": "None"},
    ],
}  # fmt: skip


class Write(NamedTuple):
    """One write of an operator, by its token, and when it was answered."""

    answered: datetime.datetime
    who: str
    lease: bool
    done: bool
    told: str = ""
    """What it was: verb, object, status code, and when it was asked for and answered."""


def writes_of(lines: Iterable[str]) -> Iterator[Write]:
    """Read the writes from an audit log; the rest of it is left out."""
    for line in lines:
        event = json.loads(line)
        if event["stage"] != "ResponseComplete" or event["user"]["username"] != ACCOUNT:
            continue
        if "dryRun=" in event.get("requestURI", ""):
            continue  # it wrote nothing
        what = event.get("objectRef") or {}
        extra = event["user"].get("extra") or {}
        yield Write(
            datetime.datetime.fromisoformat(event["stageTimestamp"]),
            (extra.get(CREDENTIAL) or ["?"])[0],
            what.get("resource") == "leases" and what.get("name") == LEASE,
            event["responseStatus"]["code"] < 300,
            f"{event.get('verb')} {what.get('resource')}/{what.get('name')}"
            f" {event['responseStatus']['code']}"
            f" {event.get('requestReceivedTimestamp')} {event['stageTimestamp']}",
        )


def two_leaders(found: Iterable[Write]) -> tuple[list[Write], int]:
    """Return the writes that ended while another operator held the Lease, and count them all.

    One that the API server refused is among them, and wrote nothing. An operator holds the Lease
    from the answer to its first write of it until the answer to another one's.
    """
    in_order = sorted(found, key=lambda one: one.answered)
    terms = [one for one in in_order if one.lease and one.done]
    starts = [
        (one.answered, one.who)
        for before, one in zip([None, *terms], terms, strict=False)
        if before is None or before.who != one.who
    ]
    wrong, count = list[Write](), 0
    for one in in_order:
        if one.lease:
            continue
        count += 1
        holder = [who for at, who in starts if at <= one.answered]
        if not holder or holder[-1] != one.who:
            wrong.append(one)
    return wrong, count


@contextmanager
def audited() -> Iterator[tuple[Lab, Path]]:
    """A control plane with an audit log; all of it ends with the block."""
    end_by_signals()
    lab = new_lab(node=False)
    log, policy = lab.plane.home / "audit.log", lab.plane.home / "audit.yaml"
    lab.plane.api_flags = (f"--audit-policy-file={policy}", f"--audit-log-path={log}")
    try:
        lab.plane.home.mkdir(parents=True, exist_ok=True)
        policy.write_text(yaml.safe_dump(AUDIT))
        lab.start()
        lab.kube("create", "namespace", NAMESPACE)
        yield lab, log
    finally:
        lab.stop()


class Replicas:
    """Two operators that stand by for each other, each with a token of its own.

    One that ends is followed by another one, as in a Deployment.
    """

    def __init__(self, kube: Kube, folder: Path) -> None:
        self._kube, self._folder = kube, folder
        self._numbers = itertools.count()
        self.running: list[Operator] = []
        self.paused: list[Operator] = []

    def _start(self) -> Operator:
        folder = self._folder / f"replica-{next(self._numbers)}"
        folder.mkdir()
        account = operator_kubeconfig(self._kube, folder / "kubeconfig")
        flags = ("--qps", "1000", "--burst", "2000", f"--leader-election={NAMESPACE}/{LEASE}")
        return Operator(account, NAMESPACE, *flags, ready=False)

    async def keep(self) -> None:
        """Keep two of them running until canceled."""
        while True:
            self.running = [one for one in self.running if one.runs()]
            while len(self.running) + len(self.paused) < 2:
                self.running.append(await asyncio.to_thread(self._start))
            await asyncio.sleep(0.5)

    async def leader(self) -> Operator | None:
        """Return the operator that says that it leads and is not paused."""
        for one in list(self.running):
            try:
                if await asyncio.to_thread(one.metric, "plimsoll_operator_leader") == 1:
                    return one
            except OSError:
                continue
        return None

    async def leads(self) -> Operator:
        """Wait until one of them leads and has listed all, and the other stands by; return it."""
        since, known = time.monotonic(), None
        while True:
            found = await self.leader()
            standing = [one for one in self.running if await stands(one)]
            both = len(standing) == 2 and found is not None and await working(found)
            if not both or found is not known:
                since, known = time.monotonic(), found
            elif found is not None and time.monotonic() - since > SETTLED_S:
                return found
            await asyncio.sleep(0.5)

    async def taken_over(self) -> float:
        """Seconds until one of them says that it leads."""

        async def leads() -> bool:
            return await self.leader() is not None

        return await until(leads, "another one leads", LIMIT_S)

    def stop(self) -> None:
        for one in (*self.running, *self.paused):
            one.kill()


async def measure(lab: Lab, log: Path, services: int) -> dict[str, Any]:
    """Run the story and return its figures."""
    replicas = Replicas(lab.kube, log.parent)
    beside = [asyncio.create_task(replicas.keep())]
    try:
        async with Admin.connect(lab) as admin:
            tell("creating")
            await create(admin, [f"s{index:05d}" for index in range(services)])
            tell("reconciling")
            await until(lambda: all_made(admin, services), "all children and status", LIMIT_S)
            throttle(lab)
            beside += [asyncio.create_task(one) for one in (flood(lab), changing(admin, services))]
            first = await replicas.leads()
            tell("the leader is stopped")
            replicas.running.remove(first)
            replicas.paused.append(first)
            os.kill(first.pid, signal.SIGSTOP)
            paused_s = await replicas.taken_over()
            await asyncio.sleep(max(0.0, PAUSE_S - paused_s))
            os.kill(first.pid, signal.SIGCONT)
            await until(lambda: ended(first), "it ends by itself", LIMIT_S)
            replicas.paused.clear()
            second = await replicas.leads()
            tell("its successor is killed")
            replicas.running.remove(second)
            second.kill()
            killed_s = await replicas.taken_over()
            await replicas.leads()
            await asyncio.sleep(5.0)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        replicas.stop()
    with log.open() as lines:
        wrong, count = two_leaders(writes_of(lines))
    for one in wrong:
        tell(f"another operator had the Lease: {one.told}")
    return {
        "takeover_services_count": services,
        "two_leaders_count": sum(one.done for one in wrong),
        "late_refused_count": sum(not one.done for one in wrong),
        "audited_writes_count": count,
        "takeover_s": killed_s,
        "takeover_from_stopped_s": paused_s,
    }


async def ended(operator: Operator) -> bool:
    return not operator.runs()


async def stands(operator: Operator) -> bool:
    """Whether it runs and is ready."""
    try:
        return await asyncio.to_thread(operator.ready)
    except AssertionError:
        return False


async def working(operator: Operator) -> bool:
    """Whether it has listed everything."""
    return "watching" in await asyncio.to_thread(operator.log.read_text)


def throttle(lab: Lab) -> None:
    """Start the API server again, with few seats."""
    lab.plane.api_flags += IN_FLIGHT
    lab.plane.restart_api_server()


async def flood(lab: Lab) -> None:
    """Ask for all ConfigMaps, :data:`FLOOD` times at once, as an account of the cluster."""
    lab.kube("create", "serviceaccount", "flood", "-n", NAMESPACE)
    lab.kube("create", "rolebinding", "flood", "-n", NAMESPACE, "--clusterrole=view",
             f"--serviceaccount={NAMESPACE}:flood")  # fmt: skip
    token = lab.kube("create", "token", "flood", "-n", NAMESPACE).strip()
    async with Admin.connect(lab, token) as client:
        path = KINDS_BY_NAME["ConfigMap"].path(NAMESPACE)

        async def ask() -> None:
            while True:
                try:
                    await client.call("GET", f"{path}?limit=500")
                except (RuntimeError, OSError, TimeoutError):
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(ask() for _ in range(FLOOD)))


async def changing(admin: Admin, services: int) -> None:
    """Change a service now and then, so that the leader has something to write."""
    for turn in itertools.count():
        patch = {"spec": {"memory": {"host": {"growthBudget": f"{turn + 1}Mi"}}}}
        path = SERVICE.path(NAMESPACE, f"s{turn * 37 % services:05d}")
        with contextlib.suppress(RuntimeError, OSError, TimeoutError):
            await admin.call("PATCH", path, patch, "merge-patch+json")
        await asyncio.sleep(1.0 / CHANGES_PER_S)


def tell(text: str) -> None:
    print(f"{time.strftime('%T')} {text}", file=sys.stderr, flush=True)


def run(services: int = SERVICES) -> dict[str, Any]:
    """Return the figures, from a control plane of its own."""
    with audited() as (lab, log):
        return asyncio.run(measure(lab, log, services))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--services", type=int, default=SERVICES, metavar="N")
    add("hostile", "take_over", run(parser.parse_args().services))


if __name__ == "__main__":
    main()
