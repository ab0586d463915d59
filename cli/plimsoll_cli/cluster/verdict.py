"""``plimsoll verdict``: show the operator's verdict on whether a revision leaks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from plimsoll_api.inferenceservice_status import Leaks
from plimsoll_api.names import POLICY_PLURAL, SERVICE_KIND, SERVICE_PLURAL
from plimsoll_cli.cluster.client import Cluster, NotFoundError
from plimsoll_cli.errors import RunError
from plimsoll_cli.output import Cell, Output, make_console, print_table, print_value

POLL_PERIOD_S = 5.0
EXIT_STATUS_BY_VERDICT = {Leaks.NO: 0, Leaks.YES: 1, Leaks.UNKNOWN: 3}
"""Exit status of each verdict; 2 means a usage error."""
VERDICTS_WORST_FIRST = (Leaks.YES, Leaks.UNKNOWN, Leaks.NO)
COLUMNS = ["NAMESPACE", "OBJECT", "REVISION", "LEAKS", "MINUTES LEFT", "MESSAGE"]


def show_verdicts(cluster: Cluster, revision: str, wait_s: float, output: Output) -> int:
    """Print the verdicts on ``revision``, and return the exit status of the worst verdict.

    Waits up to ``wait_s`` seconds while it is Unknown. Raises RunError if there is none.
    """
    deadline = time.monotonic() + wait_s
    while True:
        found = [one for one in _read_verdicts(cluster) if one["revision"] == revision]
        worst = next(
            (one for one in VERDICTS_WORST_FIRST if _has_verdict(found, one)), Leaks.UNKNOWN
        )
        left_s = deadline - time.monotonic()
        if worst is not Leaks.UNKNOWN or left_s <= 0:
            break
        time.sleep(min(POLL_PERIOD_S, left_s))
    if not found:
        raise RunError(
            f"no service or policy has a verdict on revision {revision}: use a revision from"
            " status.verdicts of an InferenceService, or of a workload in a SupervisionPolicy, or"
            " select another namespace with -n"
        )
    if output.is_table:
        print_table(COLUMNS, [_make_cells(one) for one in found], make_console())
    else:
        print_value(found, output)
    return EXIT_STATUS_BY_VERDICT[worst]


def _read_verdicts(cluster: Cluster) -> Iterator[dict[str, Any]]:
    for item in cluster.list_custom_objects(SERVICE_PLURAL):
        yield from _parse_verdicts(
            item, SERVICE_KIND, item["metadata"]["name"], item.get("status") or {}
        )
    with contextlib.suppress(NotFoundError):  # older installations have no SupervisionPolicy
        for item in cluster.list_custom_objects(POLICY_PLURAL):
            for one in (item.get("status") or {}).get("workloads") or ():
                yield from _parse_verdicts(item, one["kind"], one.get("name", ""), one)


def _parse_verdicts(
    item: dict[str, Any], kind: str, name: str, status: Any
) -> Iterator[dict[str, Any]]:
    where = {"namespace": item["metadata"]["namespace"], "object": f"{kind}/{name}"}
    for one in status.get("verdicts") or ():
        yield where | one


def _has_verdict(verdicts: list[dict[str, Any]], answer: Leaks) -> bool:
    return any(one["leaks"] == answer for one in verdicts)


def _make_cells(verdict: dict[str, Any]) -> list[Cell]:
    left = verdict.get("minutesLeft", "")
    return [*(verdict[key] for key in ("namespace", "object", "revision", "leaks")), f"{left}",
            verdict["message"]]  # fmt: skip
