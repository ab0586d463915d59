"""``plimsoll verdict``: whether a revision leaks, as the operator decided it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from plimsoll_api.inferenceservice_status import Leaks
from plimsoll_api.names import POLICY_PLURAL, SERVICE_KIND, SERVICE_PLURAL
from plimsoll_cli.cluster.client import AbsentError, Cluster
from plimsoll_cli.errors import RunError
from plimsoll_cli.output import Cell, Output, console, show, write

PERIOD_S = 5.0
EXITS = {Leaks.NO: 0, Leaks.YES: 1, Leaks.UNKNOWN: 3}
"""Exit status of each answer; 2 is that of a usage error."""
WORST_FIRST = (Leaks.YES, Leaks.UNKNOWN, Leaks.NO)
COLUMNS = ["NAMESPACE", "OBJECT", "REVISION", "LEAKS", "MINUTES LEFT", "MESSAGE"]


def run(cluster: Cluster, revision: str, wait_s: float, output: Output) -> int:
    """Print the verdicts on ``revision`` and return the exit status of the worst one.

    Wait at most ``wait_s`` seconds for an answer other than Unknown.
    """
    deadline = time.monotonic() + wait_s
    while True:
        found = [one for one in _verdicts(cluster) if one["revision"] == revision]
        worst = next((one for one in WORST_FIRST if _has(found, one)), Leaks.UNKNOWN)
        left_s = deadline - time.monotonic()
        if worst is not Leaks.UNKNOWN or left_s <= 0:
            break
        time.sleep(min(PERIOD_S, left_s))
    if not found:
        raise RunError(
            f"no pod of a service or policy has the revision {revision}: status.verdicts of"
            " InferenceServices, and of workloads in SupervisionPolicies, list those that have"
            " pods; choose another namespace with -n"
        )
    if output.for_people:
        show(COLUMNS, [_cells(one) for one in found], console())
    else:
        write(found, output)
    return EXITS[worst]


def _verdicts(cluster: Cluster) -> Iterator[dict[str, Any]]:
    for item in cluster.list_own(SERVICE_PLURAL):
        yield from _of(item, SERVICE_KIND, item["metadata"]["name"], item.get("status") or {})
    with contextlib.suppress(AbsentError):  # older installations have no policies
        for item in cluster.list_own(POLICY_PLURAL):
            for one in (item.get("status") or {}).get("workloads") or ():
                yield from _of(item, one["kind"], one.get("name", ""), one)


def _of(item: dict[str, Any], kind: str, name: str, status: Any) -> Iterator[dict[str, Any]]:
    where = {"namespace": item["metadata"]["namespace"], "object": f"{kind}/{name}"}
    for one in status.get("verdicts") or ():
        yield where | one


def _has(found: list[dict[str, Any]], answer: Leaks) -> bool:
    return any(one["leaks"] == answer for one in found)


def _cells(one: dict[str, Any]) -> list[Cell]:
    left = one.get("minutesLeft", "")
    return [*(one[key] for key in ("namespace", "object", "revision", "leaks")), f"{left}",
            one["message"]]  # fmt: skip
