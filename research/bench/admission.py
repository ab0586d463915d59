"""Admission of pods under a policy: what the API server waits for the webhook, at 50 pods a second,
and what the operator needs for the pods that are supervised then.

    python -m bench.admission [--seconds 30] [--pods 2000] [--note TEXT]    # as root

The figures are the API server's own histogram of this webhook's duration, from before to after the
run; a quantile within a bucket is interpolated, as Prometheus does. It brings its control plane up
and takes it down again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

from bench import supervised_pods
from bench.control_plane import NAMESPACE, Admin, control_plane, until
from bench.result import publish
from bench.supervised_pods import supervisors
from plimsoll_api.names import API_VERSION, POLICY_KIND, POLICY_LABEL
from plimsoll_operator.kinds import POD, POLICY
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.lab.webhook import NAME, Webhook

RATE = 50
LIMIT_S = 60.0
NOW = {"gracePeriodSeconds": 0}
NAMED = re.compile(
    r"apiserver_admission_webhook_admission_duration_seconds_bucket\{(?P<labels>.*)\} (?P<n>\S+)"
)
BOUND = re.compile(r'le="(?P<le>[^"]+)"')
Buckets = dict[float, float]
Figures = dict[str, float | int | None]


def pod(number: int) -> dict[str, Any]:
    engine = {"name": "engine", "image": "vllm/vllm-openai:v0.24.0", "args": ["serve", "org/model"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"vllm-{number:06d}", "labels": {"app": "vllm"}},
        "spec": {"containers": [engine], "nodeSelector": {"plimsoll.dev/no-node": "true"}},
    }


def buckets(lab: Lab) -> Buckets:
    """The histogram of our webhooks, by upper bound."""
    found: Buckets = {}
    for line in lab.kube("get", "--raw", "/metrics").splitlines():
        match = NAMED.match(line)
        if match is not None and ".pods.plimsoll.dev" in match["labels"]:
            bound = BOUND.search(match["labels"])
            assert bound is not None
            le = float(bound["le"])
            found[le] = found.get(le, 0.0) + float(match["n"])
    return found


def quantile(counts: Buckets, share: float) -> float | None:
    """As ``histogram_quantile``; None without a sample."""
    bounds = sorted(counts)
    if not bounds or not counts[bounds[-1]]:
        return None
    rank = share * counts[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return None


async def measure(lab: Lab, kubeconfig: Path, seconds: float, pods: int) -> Figures:
    webhook = Webhook(lab.kube)
    webhook.install()
    policy = {
        "apiVersion": API_VERSION,
        "kind": POLICY_KIND,
        "metadata": {"name": "engines"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}},
    }
    operator = Operator(
        kubeconfig, NAMESPACE, "--scrape=15", *webhook.flags, "--max-waiting-pods=1000000"
    )
    try:
        async with Admin.connect(lab) as admin:
            await admin.call("POST", POLICY.path(NAMESPACE), policy)
            tries = iter(range(900_000, 1_000_000))

            async def injects() -> bool:
                made = await admin.call("POST", POD.path(NAMESPACE), pod(next(tries)))
                return POLICY_LABEL in made["metadata"]["labels"]

            await until(injects, f"{NAME} injects", LIMIT_S)
            before = buckets(lab)
            began = time.monotonic()
            waiting: set[asyncio.Task[Any]] = set()
            injected = latest = 0.0
            count = int(RATE * seconds)
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
                call = admin.call("POST", POD.path(NAMESPACE), pod(number))
                waiting.add(asyncio.create_task(call))
            for task in waiting:
                made = await task
                injected += POLICY_LABEL in made["metadata"]["labels"]
            latest = time.monotonic() - began
            after = buckets(lab)
            await admin.call("DELETE", f"{POD.path(NAMESPACE)}?labelSelector=app=vllm", NOW)
            with supervisors():
                rest = await supervised_pods.measure(admin, operator, "engines", pods)
        found = {le: n - before.get(le, 0.0) for le, n in after.items()}
        return {
            "admission_p50_s": quantile(found, 0.5),
            "admission_p99_s": quantile(found, 0.99),
            "pods_per_s": count / latest,
            "pods_count": count,
            "injected_count": int(injected),
            "failed_count": int(
                operator.metric('plimsoll_operator_admissions_total{result="failed"')
            ),
        } | rest
    finally:
        operator.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pods", type=int, default=2000, help="pods that are supervised at rest")
    parser.add_argument("--note", default="", help="for example that the machine was loaded")
    given = parser.parse_args()
    with control_plane() as (lab, kubeconfig):
        figures = asyncio.run(measure(lab, kubeconfig, given.seconds, given.pods))
    about = {"load_average": os.getloadavg()[0], "note": given.note}
    publish("admission", figures, samples=about)


if __name__ == "__main__":
    main()
