"""What the operator writes at rest while another team's webhook rewrites all that it applies.

    python -m bench.at_rest                      # ten minutes
    python -m bench.at_rest --seconds 60

A mutating webhook changes images, amounts, labels, booleans and numbers of each object, and takes a
field away. Services are touched all the time, so that each of them is reconciled again and again.
The API server's audit log counts the operator's writes; renewals of its Lease are left out, and
there are none. The figures are among those of ``hostile.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.control_plane import NAMESPACE, Admin, all_made, create, service, settled, until
from bench.result import add
from bench.take_over import audited, writes_of
from plimsoll_operator.kinds import KINDS_BY_NAME, SERVICE
from tests.lab.kube import Kube
from tests.lab.lab import Lab
from tests.lab.operator import Operator, operator_kubeconfig
from tests.lab.rewriter import REGISTRY, rewriter

SECONDS = 600.0
SERVICES = 50
SETTLE_S = 5.0
LIMIT_S = 300.0
SCALING = {
    "minReplicas": 1,
    "maxReplicas": 5,
    "target": {"metric": {"name": "m", "averageValue": "0.5"}},
}


async def measure(lab: Lab, log: Path, folder: Path, seconds: float) -> dict[str, Any]:
    kubeconfig = operator_kubeconfig(lab.kube, folder / "kubeconfig")
    operator = Operator(kubeconfig, NAMESPACE)
    try:
        async with Admin.connect(lab) as admin:
            names = [f"s{number:05d}" for number in range(SERVICES)]
            await create(admin, names[1:])
            await admin.call(
                "POST", SERVICE.path(NAMESPACE), service(names[0], autoscaling=SCALING)
            )
            await until(lambda: all_made(admin, SERVICES), "all services are made", LIMIT_S)
            made = await admin.call("GET", KINDS_BY_NAME["Deployment"].path(NAMESPACE, names[1]))
            (engine,) = made["spec"]["template"]["spec"]["containers"]
            assert engine["image"].startswith(REGISTRY), "the webhook rewrites"
            await settled(operator, SETTLE_S)
            before = operator.metric("plimsoll_operator_reconciles_total")
            began, since = time.monotonic(), datetime.datetime.now(datetime.UTC)
            for number in itertools.count():
                if time.monotonic() - began >= seconds:
                    break
                note = {"metadata": {"annotations": {"example.org/touch": str(number)}}}
                path = SERVICE.path(NAMESPACE, names[number % SERVICES])
                await admin.call("PATCH", path, note, "merge-patch+json")
                await asyncio.sleep(1.0)
            await settled(operator, SETTLE_S)
            reconciles = operator.metric("plimsoll_operator_reconciles_total") - before
    finally:
        operator.stop()
    with log.open() as lines:
        found = list(writes_of(lines))
    return {
        "writes_at_rest_count": sum(one.answered >= since for one in found),
        "writes_before_rest_count": sum(one.answered < since for one in found),
        "rest_s": seconds,
        "rest_services_count": SERVICES,
        "rest_reconciles_count": int(reconciles),
    }


def run(seconds: float = SECONDS) -> dict[str, Any]:
    """Return the figures, from a control plane of its own."""
    with audited() as (lab, log), tempfile.TemporaryDirectory(prefix="plimsoll-bench-") as folder:
        kube = Kube(lab.kube.kubectl, lab.kubeconfig, NAMESPACE)
        with rewriter(kube, Path(folder)):
            time.sleep(SETTLE_S)  # until the API server knows of the webhook
            return asyncio.run(measure(lab, log, Path(folder), seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S")
    add("hostile", "at_rest", run(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
