"""One row of ``plimsoll top``: a service or a policy, as its status shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll_api.names import POLICY_KIND, SERVICE_KIND
from plimsoll_cli.cluster.client import Object


@dataclass(frozen=True)
class Row:
    """One service or policy. Percent of the worst pod's budget; None is unknown.

    ``ready`` and ``replicas`` are the pods of a service that are ready, and those that it should
    have. Of a policy they are the pods that it supervises, and those that it selects.
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

    @property
    def key(self) -> str:
        """Return what rows of two readings are matched by."""
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


def row_of(item: Object) -> Row:
    """From an InferenceService. What its status lacks is unknown."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    memory = status.get("memory") or {}
    return Row(
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
        state=_state(status.get("conditions") or []),
        url=str(status.get("url", "")),
    )


def row_of_policy(item: Object) -> Row:
    """From a SupervisionPolicy. Its status counts no restarts."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    memory = status.get("memory") or {}
    return Row(
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
        state=_state_of_policy(status.get("conditions") or []),
        url="",
    )


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Sort by open incidents, then by the share of the budget that is spent."""
    return sorted(rows, key=lambda row: (-row.incidents, -(row.spent or -1), row.key))


def _state(conditions: list[Object]) -> str:
    """Ready, or why not; of what is ready, that it leaks slowly."""
    true = {one.get("type") for one in conditions if one.get("status") == "True"}
    if "RestartBudgetExhausted" in true:
        return "RestartBudgetExhausted"
    ready = next((one for one in conditions if one.get("type") == "Ready"), None)
    if ready is None:
        return "Unknown"
    if "Ready" in true:
        return "SlowLeak" if "SlowLeak" in true else "Ready"
    return str(ready.get("reason", "NotReady"))


def _state_of_policy(conditions: list[Object]) -> str:
    """Return ``Conflicting``, ``SlowLeak``, or the reason of ``Ready``: how many are supervised."""
    found = {one.get("type"): one for one in conditions}
    if (found.get("Conflicting") or {}).get("status") == "True":
        return "Conflicting"
    if (found.get("SlowLeak") or {}).get("status") == "True":
        return "SlowLeak"
    return str((found.get("Ready") or {}).get("reason", "Unknown"))
