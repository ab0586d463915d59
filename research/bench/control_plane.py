"""What the benchmarks of the operator share: a lab, a client that is fast enough, an operator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from plimsoll_api.names import API_VERSION, SERVICE_KIND
from plimsoll_operator.kinds import OWNED_KINDS, SERVICE, Kind
from tests.lab.lab import Lab, new_lab
from tests.lab.operator import Operator, operator_kubeconfig

NAMESPACE = "bench"
AT_ONCE = 32
ASKED_FOR = {"NetworkPolicy", "HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule"}
CHILDREN = tuple(kind for kind in OWNED_KINDS if kind.kind not in ASKED_FOR)


def end_by_signals() -> None:
    """Handle SIGINT and SIGTERM as Ctrl-C, so that the lab is removed when the program ends.

    A shell's background job would ignore SIGINT, and SIGTERM would leave the lab's directory,
    mounts and interfaces behind.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@contextmanager
def control_plane() -> Iterator[tuple[Lab, Path]]:
    """A control plane of its own and the operator's kubeconfig; all of it ends with the block."""
    end_by_signals()
    lab = new_lab(node=False)
    try:
        lab.start()
        lab.kube("create", "namespace", NAMESPACE)
        with tempfile.TemporaryDirectory(prefix="plimsoll-bench-") as folder:
            yield lab, operator_kubeconfig(lab.kube, Path(folder) / "kubeconfig")
    finally:
        lab.stop()


class Admin:
    """The administrator's requests, many at once."""

    def __init__(self, lab: Lab, session: aiohttp.ClientSession) -> None:
        self._root = f"https://127.0.0.1:{lab.plane.api_port}"
        self._session = session

    @staticmethod
    @asynccontextmanager
    async def connect(lab: Lab, token: str = "") -> AsyncIterator[Admin]:
        """As the administrator, or as the account of ``token``."""
        pki = lab.plane.pki
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        if not token:
            context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connector = aiohttp.TCPConnector(ssl=context, limit=AT_ONCE if not token else 0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            yield Admin(lab, session)

    async def call(self, method: str, path: str, body: Any = None, kind: str = "json") -> Any:
        headers = {"Content-Type": f"application/{kind}"}
        data = json.dumps(body) if body is not None else None
        async with self._session.request(
            method, self._root + path, data=data, headers=headers
        ) as answer:
            found = await answer.json()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {found.get('message')}")
            return found

    async def count(self, kind: Kind) -> int:
        """How many there are in the namespace, without reading them."""
        page = await self.call("GET", f"{kind.path(NAMESPACE)}?limit=1")
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)

    async def watch(self, kind: Kind) -> AsyncIterator[dict[str, Any]]:
        """Events from now on."""
        page = await self.call("GET", f"{kind.path(NAMESPACE)}?limit=1")
        version = page["metadata"]["resourceVersion"]
        url = f"{self._root}{kind.path(NAMESPACE)}?watch=1&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(url, timeout=timeout, read_bufsize=1 << 20) as answer:
            async for line in answer.content:
                yield json.loads(line)


def service(name: str, **spec: Any) -> dict[str, Any]:
    """An InferenceService without pods: the control plane is what is measured."""
    return {
        "apiVersion": API_VERSION,
        "kind": SERVICE_KIND,
        "metadata": {"name": name},
        "spec": {"replicas": 0, "model": {"uri": "file:///models/none"}} | spec,
    }


async def create(admin: Admin, names: Iterable[str]) -> None:
    """All of them, :data:`AT_ONCE` at a time."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> None:
        async with limit:
            await admin.call("POST", SERVICE.path(NAMESPACE), service(name))

    await asyncio.gather(*(one(name) for name in names))


async def until(check: Callable[[], Awaitable[bool]], what: str, limit_s: float) -> float:
    """Seconds until ``check`` is true; RuntimeError after ``limit_s``."""
    began = time.monotonic()
    while not await check():
        if time.monotonic() - began > limit_s:
            raise RuntimeError(f"not within {limit_s:.0f} s: {what}")
        await asyncio.sleep(0.25)
    return time.monotonic() - began


async def all_made(admin: Admin, wanted: int) -> bool:
    """Whether every service has all its children and a status."""
    for kind in reversed(CHILDREN):  # the Deployment comes last
        if await admin.count(kind) < wanted:
            return False
    services = await admin.call("GET", SERVICE.path(NAMESPACE))
    return all((one.get("status") or {}).get("observedGeneration") for one in services["items"])


async def settled(operator: Operator, quiet_s: float = 3.0, limit_s: float = 600.0) -> None:
    """Returns when the operator has had nothing to do for ``quiet_s``."""
    seen, since = -1.0, time.monotonic()

    async def quiet() -> bool:
        nonlocal seen, since
        now = await asyncio.to_thread(operator.metric, "plimsoll_operator_reconciles_total")
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > quiet_s

    await until(quiet, "the operator comes to rest", limit_s)


def rss_mib(operator: Operator) -> float:
    """Resident memory of the operator's process."""
    for line in Path(f"/proc/{operator.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {operator.pid} has no VmRSS")


def cpu_s(operator: Operator) -> float:
    """Processor time that the operator has used (proc_pid_stat(5): utime and stime)."""
    fields = Path(f"/proc/{operator.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def requests(operator: Operator) -> float:
    return operator.metric("plimsoll_operator_requests_total")


def writes(operator: Operator) -> float:
    return operator.metric("plimsoll_operator_writes_total")
