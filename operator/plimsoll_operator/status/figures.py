"""Memory figures of a service's replicas, as its status shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEP = 5
"""Percent: a status that moved with every sample would be written for ever."""


@dataclass(frozen=True)
class Figures:
    """One replica by its supervisor's metrics. None is unknown. Ratios are of the growth budget."""

    host: float | None = None
    device: float | None = None
    restarts_left: int | None = None


_WANTED = ("plimsoll_memory_budget_consumed_ratio{", "plimsoll_restart_budget_remaining")


def parse(text: str) -> Figures:
    """The figures in a Prometheus text; what is absent or cannot be read is unknown."""
    ratios: dict[str, float] = {}
    left: int | None = None
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        name, _, rest = line.rpartition(" ")
        try:
            value = float(rest)
        except ValueError:
            continue
        if value != value:  # NaN: the exporter's word for unknown
            continue
        if name.startswith(_WANTED[0]):
            for kind in ("host", "device"):
                if f'kind="{kind}"' in name:
                    ratios[kind] = value
        else:
            left = int(value)
    return Figures(ratios.get("host"), ratios.get("device"), left)


def percent(ratio: float) -> int:
    """Percent in steps of :data:`STEP`, rounded down, so that 100 means spent."""
    return int(ratio * 100 / STEP + 1e-9) * STEP


def memory(figures: Mapping[str, Figures]) -> dict[str, object]:
    """``status.memory`` of the worst replica, by pod name; empty where nothing is known."""
    found: dict[str, object] = {}
    worst: tuple[float, str] | None = None
    for kind, field in (("host", "hostConsumedPercent"), ("device", "deviceConsumedPercent")):
        known = [
            (value, pod)
            for pod, one in sorted(figures.items())
            if (value := getattr(one, kind)) is not None
        ]
        if known:
            top = max(known)
            found[field] = percent(top[0])
            worst = max(worst, top) if worst else top
    if worst:
        found["replica"] = worst[1]
    return found
