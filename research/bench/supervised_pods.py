"""Thousands of pods under one policy: what the operator holds, reads and writes while they rest.

The pods belong to real Deployments and get their supervisors through the webhook. No node runs
them; each has an address of its own (198.18.0.0/15, RFC 2544's range for benchmarks, made local to
this machine while the bench runs), at which one process serves a supervisor's page of metrics.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.control_plane import (
    AT_ONCE,
    NAMESPACE,
    Admin,
    cpu_s,
    requests,
    rss_mib,
    settled,
    until,
    writes,
)
from plimsoll_api.assessment import Assessment, BudgetState, Segment
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.names import METRICS_PORT
from plimsoll_operator.kinds import POD, POLICY, Kind
from plimsoll_sidecar.record.metrics import Metrics
from tests.lab.operator import Operator

DEPLOYMENT = Kind("Deployment", "apps", "v1", "deployments", "")
RANGE = "198.18.0.0/15"
SUBNETS = 256
PER_DEPLOYMENT = 50
MADE_S = 600.0
STEADY_S = 60.0
READ_S = 5.0


def page() -> bytes:
    """What a supervisor exposes for an engine with a budget for host memory."""
    metrics = Metrics()
    metrics.export_budgets(MemoryPolicy(host=MemoryBudget(growth_bytes=1 << 30, window_s=3600.0)))
    segments = {Segment.PYTHON_OBJECTS: 1 << 30, Segment.MALLOC_IN_USE: 2 << 30}
    state = BudgetState(baseline=3 << 30, unexplained=0, consumed_ratio=0.12)
    found = Assessment(t=1.0, epoch=1, warm=True, segments=segments, host=state)
    metrics.observe(found, {"engine": True, "host": True}, 0.001)
    metrics.export_status(1, 2, 0)
    return metrics.render()


async def _answer_all(body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = head.encode() + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "0.0.0.0", METRICS_PORT, backlog=512)
    await server.serve_forever()


def _serve(body: bytes) -> None:
    asyncio.run(_answer_all(body))


@contextmanager
def supervisors() -> Iterator[None]:
    """Every address of the range answers as a supervisor. Needs root, for the route."""
    route = ["ip", "route", "replace", "local", RANGE, "dev", "lo"]
    subprocess.run(route, check=True)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(page(),))
    server.start()
    try:
        yield
    finally:
        server.terminate()
        server.join()
        subprocess.run(["ip", "route", "del", "local", RANGE, "dev", "lo"], check=False)


def deployment(number: int, replicas: int) -> dict[str, Any]:
    engine = {"name": "engine", "image": "vllm/vllm-openai:v0.24.0", "args": ["serve", "org/model"]}
    labels = {"app": "vllm", "model": f"m{number:03d}"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"vllm-{number:03d}"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "containers": [engine],
                    "nodeSelector": {"plimsoll.dev/no-node": "true"},
                },
            },
        },
    }


async def measure(
    admin: Admin, operator: Operator, policy: str, wanted: int
) -> dict[str, float | int]:
    """Bring ``wanted`` pods up under ``policy``, whose webhook serves, and watch the operator."""
    for number in range(-(-wanted // PER_DEPLOYMENT)):
        replicas = min(PER_DEPLOYMENT, wanted - number * PER_DEPLOYMENT)
        await admin.call("POST", DEPLOYMENT.path(NAMESPACE), deployment(number, replicas))

    async def made() -> bool:
        return await admin.count(POD) >= wanted

    await until(made, f"{wanted} pods", MADE_S)
    await _run(admin)

    async def supervised() -> bool:
        found = await admin.call("GET", POLICY.path(NAMESPACE, policy))
        status = found.get("status") or {}
        known = (status.get("memory") or {}).get("hostConsumedPercent") is not None
        return known and int(status.get("supervised") or 0) >= wanted

    took = await until(supervised, f"{wanted} pods are supervised", MADE_S)
    await settled(operator, quiet_s=3.0)
    before = _counts(operator)
    peak = 0.0
    for _ in range(int(STEADY_S / READ_S)):
        await asyncio.sleep(READ_S)
        peak = max(peak, rss_mib(operator))
    rest = {key: value - before[key] for key, value in _counts(operator).items()}
    found = await admin.call("GET", POLICY.path(NAMESPACE, policy))
    return {
        "supervised_pods_count": int(found["status"]["supervised"]),
        "supervised_s": took,
        "rss_mib": peak,
        "steady_writes_count": int(rest["writes"]),
        "steady_requests_per_s": rest["requests"] / STEADY_S,
        "steady_cpu_ratio": rest["cpu_s"] / STEADY_S,
        "scrape_failures_count": int(rest["failures"]),
    }


async def _run(admin: Admin) -> None:
    """Play the kubelet: every pod runs, at an address of its own."""
    pods = (await admin.call("GET", POD.path(NAMESPACE)))["items"]
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, name: str) -> None:
        address = f"198.18.{index // SUBNETS}.{index % SUBNETS}"
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        path = f"{POD.path(NAMESPACE, name)}/status"
        async with limit:
            await admin.call("PATCH", path, {"status": status}, "merge-patch+json")

    names = [pod["metadata"]["name"] for pod in pods]
    await asyncio.gather(*(one(index + 1, name) for index, name in enumerate(names)))


def _counts(operator: Operator) -> dict[str, float]:
    return {
        "writes": writes(operator),
        "requests": requests(operator),
        "failures": operator.metric("plimsoll_operator_scrape_failures_total"),
        "cpu_s": cpu_s(operator),
    }
