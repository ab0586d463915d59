"""Summary of a service or policy for ``plimsoll top`` and the operator's page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll_api.names import POLICY_KIND, SERVICE_KIND

Object = dict[str, Any]


@dataclass(frozen=True)
class FleetRow:
    """Summary of one service or policy; unknown values are None.

    For a policy, ``ready`` counts supervised pods, and ``replicas`` selected pods. ``host`` and
    ``device`` are the consumed shares of the leak budget in the pod ``worst``, in percent.
    ``drained`` counts pods that a person took out of service.
    """

    kind: str
    namespace: str
    name: str
    ready: int | None
    replicas: int | None
    mode: str
    host: int | None
    device: int | None
    worst: str
    restarts: int | None
    incidents: int
    state: str
    url: str
    drained: int | None = None
    roles: str = ""

    @property
    def key(self) -> str:
        """Unique key of the row."""
        return f"{self.kind} {self.display_name}"

    @property
    def display_name(self) -> str:
        """Display name, as NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"

    @property
    def consumed_percent(self) -> int | None:
        """Larger of the consumed host and device budgets in percent; None if unknown."""
        known = [value for value in (self.host, self.device) if value is not None]
        return max(known, default=None)


def make_service_row(item: Object) -> FleetRow:
    """Return the row of an InferenceService; values that its status lacks are None or empty."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    memory = status.get("memory") or {}
    return FleetRow(
        kind=SERVICE_KIND,
        namespace=str(meta.get("namespace", "")),
        name=str(meta["name"]),
        ready=int(status.get("readyReplicas") or 0),
        replicas=int(spec.get("replicas", 1)),
        mode=str((spec.get("supervision") or {}).get("mode", "Observe")),
        host=memory.get("hostConsumedPercent"),
        device=memory.get("deviceConsumedPercent"),
        worst=str(memory.get("replica", "")),
        restarts=int(status.get("restarts") or 0),
        incidents=int(status.get("openIncidents") or 0),
        state=_format_drained_state(status) or _find_service_state(status.get("conditions") or []),
        url=str(status.get("url", "")),
        drained=status.get("drained"),
    )


def make_policy_row(item: Object) -> FleetRow:
    """Return the row of a SupervisionPolicy; its number of restarts is always unknown."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    memory = status.get("memory") or {}
    return FleetRow(
        kind=POLICY_KIND,
        namespace=str(meta.get("namespace", "")),
        name=str(meta["name"]),
        ready=status.get("supervised"),
        replicas=status.get("selected"),
        mode=str((spec.get("supervision") or {}).get("mode", "Observe")),
        host=memory.get("hostConsumedPercent"),
        device=memory.get("deviceConsumedPercent"),
        worst=str(memory.get("replica", "")),
        restarts=None,
        incidents=int(status.get("openIncidents") or 0),
        state=_format_drained_state(status) or _find_policy_state(status.get("conditions") or []),
        url="",
        drained=status.get("drained"),
        roles=", ".join(
            sorted({role for one in status.get("workloads") or () for role in one.get("roles", ())})
        ),
    )


def sort_rows_worst_first(rows: Iterable[FleetRow]) -> list[FleetRow]:
    """Sort rows by open incidents, and then by consumed budget, both in descending order."""
    return sorted(rows, key=lambda row: (-row.incidents, -(row.consumed_percent or -1), row.key))


# As ``Drained(COUNT)``; empty if no pod is drained or the number is unknown.
def _format_drained_state(status: Object) -> str:
    count = int(status.get("drained") or 0)
    return f"Drained({count})" if count else ""


def _find_service_state(conditions: list[Object]) -> str:
    true = {one.get("type") for one in conditions if one.get("status") == "True"}
    if "RestartBudgetExhausted" in true:
        return "RestartBudgetExhausted"
    ready = next((one for one in conditions if one.get("type") == "Ready"), None)
    if ready is None:
        return "Unknown"
    if "Ready" not in true:
        return str(ready.get("reason", "NotReady"))
    return _find_reported_problem(conditions) or "Ready"


# Without a problem, the reason of the condition ``Ready``.
def _find_policy_state(conditions: list[Object]) -> str:
    found = {one.get("type"): one for one in conditions}
    if (found.get("Conflicting") or {}).get("status") == "True":
        return "Conflicting"
    ready = str((found.get("Ready") or {}).get("reason", "Unknown"))
    return _find_reported_problem(conditions) or ready


def _find_reported_problem(conditions: list[Object]) -> str:
    found = {one.get("type"): one for one in conditions}
    for alarm in ("MemoryNearLimit", "SlowLeak"):
        if (found.get(alarm) or {}).get("status") == "True":
            return alarm
    observed = found.get("EngineObserved") or {}
    return str(observed.get("reason", "")) if observed.get("status") == "False" else ""
