"""Memory and processor time of the operator's cache, beside the same objects in ``kopf.index``.

    python -m bench.operator_cache

Each row is a process of its own, so that no earlier one leaves memory behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kopf._cogs.structs.references import NamespaceName
from kopf._core.engines.indexing import Index

from bench.result import publish
from plimsoll_api.names import API_VERSION, SERVICE_KIND
from plimsoll_operator.kinds import Key, Object
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images, render_objects
from plimsoll_operator.runtime.cache import Store

SIZES = (1000, 5000)
KEPT_BY = ("store", "index")
TEMPLATE = "s00000"


def service() -> Object:
    """A service as the benchmarks of the whole operator have it."""
    return {
        "apiVersion": API_VERSION,
        "kind": SERVICE_KIND,
        "metadata": {"name": TEMPLATE, "namespace": "bench", "uid": "u", "resourceVersion": "1"},
        "spec": {"replicas": 0, "model": {"uri": "file:///models/none"}},
    }


def measure(kept_by: str, services: int) -> dict[str, float]:
    """Fill one cache and return its cost."""
    item = service()
    templates = [
        json.dumps(one) for one in (item, *render_objects(parse_service(item), Images("e", "s")))
    ]
    store: Store = Store()
    index: Index[Any, Any] = Index()
    gc.collect()
    before, began = rss_mib(), time.process_time()
    for number in range(services):
        key = Key("bench", f"s{number:05d}")
        for position, template in enumerate(templates):
            one = json.loads(template.replace(TEMPLATE, key.name))
            one["metadata"] |= {"uid": f"{number}-{position}", "resourceVersion": str(number + 1)}
            if kept_by == "store":
                store.put(one)
            else:
                uid = one["metadata"]["uid"]
                index._replace((NamespaceName(key.namespace), key.name, uid), {key: one})
    cpu_s = time.process_time() - began
    gc.collect()
    return {"mib": rss_mib() - before, "cpu_s": cpu_s}


def rss_mib() -> float:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--one", nargs=2, metavar=("KEPT_BY", "SERVICES"), help="one row, as JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], int(given.one[1]))))
        return
    figures: dict[str, float] = {}
    for services in SIZES:
        for kept_by in KEPT_BY:
            command = [sys.executable, "-m", "bench.operator_cache"]
            command += ["--one", kept_by, str(services)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
            row = json.loads(done.stdout)
            figures |= {f"{kept_by}_{services}_{name}": value for name, value in row.items()}
    publish("operator_cache", figures)


if __name__ == "__main__":
    main()
