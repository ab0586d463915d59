"""A service or policy in one row, as ``plimsoll top`` and the operator's page show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll_api.names import POLICY_KIND, SERVICE_KIND

Object = dict[str, Any]


@dataclass(frozen=True)
class FleetRow:
    """One service or policy. Percent of the worst pod's budget; None is unknown.

    ``drained`` counts the pods that a person took out of service.

    ``ready`` and ``replicas`` count a service's ready pods and the pods that it should have. For a
    policy, they count the pods that it supervises and the pods that it selects. ``roles`` are those
    of a policy's pods in disaggregated or multi-node serving.
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
        """Return the key by which rows of two readings are matched."""
        return f"{self.kind} {self.shown}"

    @property
    def shown(self) -> str:
        """Return NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"

    @property
    def spent(self) -> int | None:
        """Return the larger consumed share of host and device, in percent; None where unknown."""
        known = [value for value in (self.host, self.device) if value is not None]
        return max(known, default=None)


def row_of(item: Object) -> FleetRow:
    """From an InferenceService. What its status lacks is unknown."""
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
    """From a SupervisionPolicy. Its status counts no restarts."""
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
    """Sort by open incidents, then by the share of the budget that is spent."""
    return sorted(rows, key=lambda row: (-row.incidents, -(row.spent or -1), row.key))


def _drained(status: Object) -> str:
    """Return how many pods a person took out of service; empty where none is known to be."""
    count = int(status.get("drained") or 0)
    return f"Drained({count})" if count else ""


def _state(conditions: list[Object]) -> str:
    """Ready, or why not; for a ready one, what is wrong with its memory or its supervision."""
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
    """Return ``Conflicting``, what the figures say, or the reason of ``Ready``."""
    found = {one.get("type"): one for one in conditions}
    if (found.get("Conflicting") or {}).get("status") == "True":
        return "Conflicting"
    ready = str((found.get("Ready") or {}).get("reason", "Unknown"))
    return _of_figures(conditions) or ready


def _of_figures(conditions: list[Object]) -> str:
    """Return what supervisors report of memory or do not see; empty if all is well."""
    found = {one.get("type"): one for one in conditions}
    for alarm in ("MemoryNearLimit", "SlowLeak"):
        if (found.get(alarm) or {}).get("status") == "True":
            return alarm
    observed = found.get("EngineObserved") or {}
    return str(observed.get("reason", "")) if observed.get("status") == "False" else ""
