"""How good a detector is at the level of events, from what it said of labelled runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll_cli.figures import compute_percentile


@dataclass
class Verdict:
    """One run under one detector. Times in seconds after the leak's begin, sizes in bytes.

    ``delay_s`` is None where the leak was not found, or where there is none; ``false`` counts
    what was confirmed without a leak of that kind, ``false_stalls`` those of them that are stalls,
    and ``actions`` the restarts without one. The trigger is judged when the incident is confirmed,
    and when its restart begins.
    """

    case: str
    family: str
    leak: bool
    hours: float
    delay_s: float | None = None
    leaked: float | None = None
    consumed: float | None = None
    segment_right: bool | None = None
    trigger_at_confirm: bool | None = None
    trigger_right: bool | None = None
    false: int = 0
    false_stalls: int = 0
    actions: int = 0


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float] | None:
    """The 95 % interval of a share (Wilson 1927); None of nothing."""
    if total == 0:
        return None
    share, square = hits / total, z * z
    middle = share + square / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    scale = 1 + square / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def f1(verdicts: Sequence[Verdict]) -> float:
    found = sum(v.leak and v.delay_s is not None for v in verdicts)
    missed = sum(v.leak and v.delay_s is None for v in verdicts)
    false = sum(v.false for v in verdicts)
    return 2 * found / max(1, 2 * found + false + missed)


def figures(verdicts: Sequence[Verdict], prefix: str = "") -> dict[str, float | int | None]:
    """Precision, recall and what the confirmations cost; a figure of nothing is None."""
    leaks = [v for v in verdicts if v.leak]
    found = [v for v in leaks if v.delay_s is not None]
    false = sum(v.false for v in verdicts)
    consumed = [v.consumed for v in found if v.consumed is not None]
    named = [v.segment_right for v in found if v.segment_right is not None]
    result: dict[str, float | int | None] = {
        **_share("precision_ratio", len(found), len(found) + false),
        **_share("recall_ratio", len(found), len(leaks)),
        "false_events_count": false,
        "false_actions_count": sum(v.actions for v in verdicts),
        "negative_replica_hours": round(sum(v.hours for v in verdicts if not v.leak), 1),
        "consumed_at_confirm_p50_ratio": compute_percentile(consumed, 0.5),
        "consumed_at_confirm_p95_ratio": compute_percentile(consumed, 0.95),
        "segment_top1_ratio": sum(named) / len(named) if named else None,
    }
    return {prefix + key: value for key, value in result.items()}


def _share(name: str, hits: int, total: int) -> dict[str, float | int | None]:
    interval = wilson(hits, total)
    if interval is None:
        return {name: None}
    return {name: hits / total, f"{name}_low": interval[0], f"{name}_high": interval[1]}
