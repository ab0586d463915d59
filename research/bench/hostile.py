"""What a hostile pod costs the cluster: it writes incidents with its own token, as fast as it may.

    python -m bench.hostile                  # all that it may write within an hour, at once
    python -m bench.hostile --seconds 20     # or what it can write in that time

An hour's writes are bounded by the few names that a pod has, by the number of writes of each status
and by how slowly the operator gives names back. So the hour is compressed into minutes: the
operator deletes incidents after ten seconds instead of ten minutes. etcd compacts every five
minutes as always, so its growth in this short time is an upper bound. Meanwhile, a supervisor of
another service publishes incidents: their delay is the time until that service's status names them.
The figures of ``bench.take_over`` in the same file stay.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import threading
import time
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from bench.control_plane import NAMESPACE, Admin, control_plane, rss_mib, service, until
from bench.result import RESULTS, earlier, publish
from plimsoll_api.incident_object import make_path
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.leakincident import (
    MAX_INCIDENT_TEXT_CHARS,
    MAX_INCIDENTS_PER_POD,
    MAX_STATUS_STEPS,
    MAX_STATUS_WRITES,
    MAX_TOTAL_TEXT_CHARS,
)
from plimsoll_api.names import API_GROUP, INCIDENT_KIND, SERVICE_KIND, SERVICE_LABEL
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.times import format_rfc3339
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.fleet.incidents import MAX_KEPT_INCIDENTS_PER_POD
from plimsoll_operator.kinds import POD, SERVICE
from plimsoll_sidecar.clients.kube import KubeClient, KubeError
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.publisher import Publisher
from tests.lab.images import ROOT
from tests.lab.operator import Operator

AGE_S, SHORT_AGE_S = DEFAULT_INTERVALS.incident_age, 10.0
NAMES_AN_HOUR = MAX_INCIDENTS_PER_POD + int(3600 / AGE_S) * (
    MAX_INCIDENTS_PER_POD - MAX_KEPT_INCIDENTS_PER_POD
)
HOUR = NAMES_AN_HOUR * (1 + MAX_STATUS_WRITES)
"""Writes that the API server accepts within an hour."""
WRITERS = 4
HOSTILE, OTHER = "hostile", "other"
OTHERS_EVERY_S = 1.0
DELAY_LIMIT_S, QUIET_S, LIMIT_S = 60.0, 20.0, 500.0


class Writer:
    """The hostile pod: objects as large as the schema allows, one after the other."""

    def __init__(self, client: KubeClient, pod: str) -> None:
        self._client, self._pod = client, pod
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.answers: Counter[str] = Counter()

    def count(self, accepted: bool) -> int:
        """How many writes were accepted, or refused."""
        found = self.answers.items()
        return sum(n for what, n in found if what.endswith("accepted") is accepted)

    def run(self, part: int) -> None:
        """Write under every ``WRITERS``-th name until it is stopped."""
        for turn in itertools.count():
            for number in range(part, MAX_INCIDENTS_PER_POD, WRITERS):
                self._incident(f"{self._pod}-{number}")
                if self.stop.is_set():
                    return
            self._create(f"{self._pod}-{turn}x")  # not one of its names

    def _incident(self, name: str) -> None:
        self._create(name)
        for revision in range(1, MAX_STATUS_WRITES + 2):
            if self.stop.is_set() or not self._try("status", partial(self._status, name, revision)):
                return

    def _create(self, name: str) -> None:
        spec = {
            "id": name,
            "workloadRef": {"apiGroup": API_GROUP, "kind": SERVICE_KIND, "name": HOSTILE},
            "pod": self._pod,
            "container": "c" * 253,
            "epoch": "e" * 253,
            "openedAt": format_rfc3339(time.time()),
            "kind": "HostGrowth",
        }
        labels = {SERVICE_LABEL: HOSTILE}
        body = _object(name) | {"spec": spec}
        body["metadata"]["labels"] = labels
        self._try("create", lambda: self._client.create(make_path(NAMESPACE, ""), body))

    def _status(self, name: str, revision: int) -> None:
        now, full = format_rfc3339(time.time()), MAX_TOTAL_TEXT_CHARS // MAX_INCIDENT_TEXT_CHARS
        step = {"time": now, "step": "s" * 63, "outcome": "o" * 63, "beforeBytes": 1 << 62}
        text = f"{random.random()}" + "x" * MAX_INCIDENT_TEXT_CHARS
        steps = [step | ({"message": text[:MAX_INCIDENT_TEXT_CHARS]} if n < full else {})
                 for n in range(MAX_STATUS_STEPS)]  # fmt: skip
        attribution = dict.fromkeys(("segment", "process", "pod"), "y" * 253)
        status = {"phase": "Confirmed", "revision": revision, "timeline": steps}
        body = _object(name) | {"status": status | {"attribution": attribution}}
        self._client.apply(make_path(NAMESPACE, name, "status"), body)

    def _try(self, what: str, call: Any) -> bool:
        try:
            call()
        except KubeError as error:
            with self._lock:
                self.answers[f"{what} {error.status}"] += 1
            return False
        with self._lock:
            self.answers[f"{what} accepted"] += 1
            if self.count(accepted=True) >= HOUR:
                self.stop.set()
        return True


def _object(name: str) -> dict[str, Any]:
    kind = {"apiVersion": f"{API_GROUP}/v1alpha1", "kind": INCIDENT_KIND}
    return kind | {"metadata": {"name": name, "namespace": NAMESPACE}}


class Others:
    """The supervisor of another service, which publishes an incident now and then."""

    def __init__(self, client: KubeClient, uid: str, pod: str, first: int = 0) -> None:
        self._first = first
        self._publisher = Publisher(client, ServiceRef(OTHER, NAMESPACE, uid), pod)
        self._pod = pod
        self.delays: list[float] = []

    async def run(self, admin: Admin, seconds: float, stop: threading.Event | None = None) -> None:
        """Publish until ``stop``, or for ``seconds``.

        A delay beyond :data:`DELAY_LIMIT_S` counts as that.
        """
        began = time.monotonic()
        for number in itertools.count(self._first):
            if time.monotonic() - began > seconds or (stop and stop.is_set()):
                return
            now = time.time()
            incident = Incident(
                name=f"{self._pod}-{number}", kind=IncidentKind.STALL, epoch="a:1", opened_at=now,
                phase=IncidentPhase.OPEN, phase_since=now,
            )  # fmt: skip
            offered, before = time.monotonic(), await self._last(admin)

            async def seen(before: str = before) -> bool:
                return await self._last(admin) != before

            try:
                await asyncio.to_thread(self._publisher.publish, incident)
                await until(seen, "the status names the incident", DELAY_LIMIT_S)
                self.delays.append(time.monotonic() - offered)
            except (KubeError, RuntimeError) as error:
                print(f"another one's incident: {error}")
                self.delays.append(DELAY_LIMIT_S)
            incident.phase, incident.ended_at = IncidentPhase.RESOLVED, time.time()
            await asyncio.to_thread(self._publisher.publish, incident)
            await asyncio.sleep(OTHERS_EVERY_S)

    async def _last(self, admin: Admin) -> str:
        item = await admin.call("GET", SERVICE.path(NAMESPACE, OTHER))
        return str((item.get("status") or {}).get("lastIncident"))


def etcd_bytes(lab: Any) -> int:
    """Size of etcd's file, which only defragmentation makes smaller."""
    url = f"http://127.0.0.1:{lab.plane.etcd_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("etcd_mvcc_db_total_size_in_bytes "):
                return int(float(line.split()[1]))
    raise RuntimeError(f"{url} has no etcd_mvcc_db_total_size_in_bytes")


async def token(admin: Admin, name: str) -> tuple[str, str]:
    """The pod of a service, and a token of its supervisor's account that is bound to it."""
    pods = f"{POD.path(NAMESPACE)}?labelSelector={SERVICE_LABEL}%3D{name}"

    async def there() -> bool:
        return bool((await admin.call("GET", pods))["items"])

    await until(there, f"{name} has a pod", 120)
    meta = (await admin.call("GET", pods))["items"][0]["metadata"]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
               "spec": {"boundObjectRef": bound}}  # fmt: skip
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}-supervisor/token"
    return meta["name"], (await admin.call("POST", path, request))["status"]["token"]


async def measure(lab: Any, account: Path, seconds: float) -> tuple[dict[str, Any], dict[str, int]]:
    lab.kube("apply", "-f", str(ROOT / "config" / "admission-policy.yaml"))
    operator = Operator(
        account, NAMESPACE, "--scrape", "60", "--clock", f"incident-age={SHORT_AGE_S}"
    )
    server = f"https://127.0.0.1:{lab.plane.api_port}"
    threads: list[threading.Thread] = []
    writer: Writer | None = None
    try:
        async with Admin.connect(lab) as admin:
            template = {"spec": {"nodeSelector": {"plimsoll.dev/no-node": "true"}}}
            clients, uids, pods = {}, {}, {}
            for name in (HOSTILE, OTHER):
                body = service(name, replicas=1, podTemplate=template)
                made = await admin.call("POST", SERVICE.path(NAMESPACE), body)
                pods[name], text = await token(admin, name)
                file = account.parent / f"token-{name}"
                file.write_text(text)
                clients[name] = KubeClient(server, file, lab.plane.pki / "ca.crt")
                uids[name] = made["metadata"]["uid"]
            quiet = Others(clients[OTHER], uids[OTHER], pods[OTHER])
            await quiet.run(admin, QUIET_S)
            rss, size = rss_mib(operator), etcd_bytes(lab)
            most = [rss]
            writer = Writer(clients[HOSTILE], pods[HOSTILE])
            threads = [threading.Thread(target=writer.run, args=(n,)) for n in range(WRITERS)]
            for thread in threads:
                thread.start()
            watching = asyncio.create_task(_watch(operator, most))
            others = Others(clients[OTHER], uids[OTHER], pods[OTHER], first=1000)
            began = time.monotonic()
            await others.run(admin, seconds, writer.stop)
            taken = time.monotonic() - began
            writer.stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            watching.cancel()
            kept = await admin.call("GET", make_path(NAMESPACE, ""))
            of_pods = Counter(one["spec"]["pod"] for one in kept["items"])
            return {
                "observed_s": round(taken, 1),
                "writes_of_an_hour_count": HOUR,
                "accepted_writes_count": writer.count(accepted=True),
                "refused_writes_count": writer.count(accepted=False),
                "etcd_growth_mib": round((etcd_bytes(lab) - size) / (1 << 20), 1),
                "operator_rss_before_mib": round(rss, 1),
                "operator_rss_mib": round(max(most), 1),
                "incidents_of_pod_count": of_pods[pods[HOSTILE]],
                "others_incident_count": len(others.delays),
                "others_incident_delay_quiet_p99_s": _p99(quiet.delays),
                "others_incident_delay_p50_s": sorted(others.delays)[len(others.delays) // 2],
                "others_incident_delay_p99_s": _p99(others.delays),
            }, dict(sorted(writer.answers.items()))
    finally:
        if writer is not None:
            writer.stop.set()
        operator.stop()


def _p99(values: list[float]) -> float:
    return round(sorted(values)[int(len(values) * 0.99)], 3)


async def _watch(operator: Operator, most: list[float]) -> None:
    while True:
        most.append(rss_mib(operator))
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LIMIT_S, metavar="S")
    given = parser.parse_args()
    with control_plane() as (lab, account):
        figures, answers = asyncio.run(measure(lab, account, given.seconds))
    others, samples = earlier(RESULTS / "hostile.json")
    publish("hostile", others | figures, samples | answers)


if __name__ == "__main__":
    main()
