"""Summary of a service or policy for ``plimsoll top`` and the operator's page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll_api.names import POLICY_KIND, SERVICE_KIND

Object = dict[str, Any]


@dataclass(frozen=True)
class FleetRow:
    """Summary of one service or policy.

    ``host`` and ``device`` are the worst pod's consumed budgets in percent. ``ready`` and
    ``replicas`` are the numbers of ready and desired pods of a service, or of supervised and
    selected pods of a policy. ``drained`` is the number of pods that a person took out of service.
    ``roles`` are the roles of a policy's pods in disaggregated or multi-node serving. None means
    unknown.
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
        """Stable key that identifies the row."""
        return f"{self.kind} {self.shown}"

    @property
    def shown(self) -> str:
        """Display name, as NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"

    @property
    def spent(self) -> int | None:
        """Larger consumed share of the host and device budgets in percent; None if unknown."""
        known = [value for value in (self.host, self.device) if value is not None]
        return max(known, default=None)


def row_of(item: Object) -> FleetRow:
    """Create a row from an InferenceService. Fields that its status lacks are unknown."""
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
        state=_drained(status) or _state(status.get("conditions") or []),
        url=str(status.get("url", "")),
        drained=status.get("drained"),
    )


def row_of_policy(item: Object) -> FleetRow:
    """Create a row from a SupervisionPolicy, whose status does not count restarts."""
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
        state=_drained(status) or _state_of_policy(status.get("conditions") or []),
        url="",
        drained=status.get("drained"),
        roles=", ".join(
            sorted({role for one in status.get("workloads") or () for role in one.get("roles", ())})
        ),
    )


def worst_first(rows: Iterable[FleetRow]) -> list[FleetRow]:
    """Sort rows by open incidents, then by the consumed share of the budget, highest first."""
    return sorted(rows, key=lambda row: (-row.incidents, -(row.spent or -1), row.key))


def _drained(status: Object) -> str:
    """Return the number of drained pods as a text; empty if zero or unknown."""
    count = int(status.get("drained") or 0)
    return f"Drained({count})" if count else ""


def _state(conditions: list[Object]) -> str:
    """Return ``Ready``, or the most important problem of a service."""
    true = {one.get("type") for one in conditions if one.get("status") == "True"}
    if "RestartBudgetExhausted" in true:
        return "RestartBudgetExhausted"
    ready = next((one for one in conditions if one.get("type") == "Ready"), None)
    if ready is None:
        return "Unknown"
    if "Ready" not in true:
        return str(ready.get("reason", "NotReady"))
    return _of_figures(conditions) or "Ready"


def _state_of_policy(conditions: list[Object]) -> str:
    """Return ``Conflicting``, the problem that supervisors report, or the reason of ``Ready``."""
    found = {one.get("type"): one for one in conditions}
    if (found.get("Conflicting") or {}).get("status") == "True":
        return "Conflicting"
    ready = str((found.get("Ready") or {}).get("reason", "Unknown"))
    return _of_figures(conditions) or ready


def _of_figures(conditions: list[Object]) -> str:
    """Return the first problem that supervisors report; empty if there is none."""
    found = {one.get("type"): one for one in conditions}
    for alarm in ("MemoryNearLimit", "SlowLeak"):
        if (found.get(alarm) or {}).get("status") == "True":
            return alarm
    observed = found.get("EngineObserved") or {}
    return str(observed.get("reason", "")) if observed.get("status") == "False" else ""
