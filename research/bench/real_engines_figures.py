"""The figures of ``real_engines.py`` from its rows: pure, and tested as such."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Z_975 = 1.959964
LEAK_S, STALL_S, YOUNG_STALL_S = 60.0, 20.0, 45.0
SERVED_S, FIRST_S = 300.0, 60.0
"""From which on a stall has the shorter bound, and from which on it has one at all."""


def t_975(degrees: int) -> float:
    """The quantile of Student's t of which 2.5 % are above, by Hill's expansion: exact to .002 from
    nine degrees of freedom on."""
    z = Z_975
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return z + first + second + third


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95 % interval. ValueError for fewer than two values."""
    if len(values) < 2:
        raise ValueError("an interval needs two values or more")
    mean = statistics.fmean(values)
    half = t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def lost(asked_tok_s: float, unasked_tok_s: float) -> float:
    """The share of throughput that one pair of windows lost."""
    return 1.0 - asked_tok_s / unasked_tok_s


def figures(rows: Iterable[Row]) -> dict[str, float | int | None]:
    """All figures that the rows can say; None for what did not run.

    A row with ``set_apart``, which says why, counts for none.
    """
    every = _kept(rows)
    made: dict[str, float | int | None] = {}
    healthy = _of(every, "healthy")
    made.update(_healthy("healthy", [row for row in healthy if not row.get("whole_device")]))
    made.update(_healthy("whole_device", [row for row in healthy if row.get("whole_device")]))
    made.update(_throughput(_of(every, "pair")))
    ready = [row["seconds"] for row in _of(every, "ready") if row["life"] == 1]
    made["ready_s"] = max(ready, default=None)
    leaks = _of(every, "leak")
    for name, kind in (("leak", "host"), ("device_leak", "device")):
        for word, later in (("", False), ("second_", True)):
            found = [r for r in leaks if r["memory"] == kind and (r["life"] > 1) is later]
            made |= _confirmed(f"{word}{name}", found)
    made["leaks_count"] = len(leaks)
    found = [row for row in leaks if row["seconds"] is not None]
    if found:
        right = [
            r["segment"] == r["segment_due"] and r["process"] == r["process_due"] for r in found
        ]
        made["segment_and_process_right_ratio"] = sum(right) / len(found)
    made["segment_right_count"] = sum(row["segment"] == row["segment_due"] for row in leaks)
    made["process_right_count"] = sum(row["process"] == row["process_due"] for row in leaks)
    for how in ("busy", "idle"):
        of_how = [row for row in _of(every, "stall") if row["how"] == how]
        fronts = [row for row in of_how if row.get("part") == "frontend"]
        made |= _confirmed(f"frontend_stall_{how}", fronts)
        stalls = [row for row in of_how if row not in fronts]
        old = [row for row in stalls if row["served_s"] >= SERVED_S]
        young = [row for row in stalls if FIRST_S <= row["served_s"] < SERVED_S]
        first = [row for row in stalls if row["served_s"] < FIRST_S]
        made |= _confirmed(f"stall_{how}", old) | _confirmed(f"young_stall_{how}", young)
        made |= _confirmed(f"first_minute_stall_{how}", first)
    made |= _diagnoses(_of(every, "diagnosis"), _of(every, "diagnosis-memory"))
    stairs = _of(every, "staircase")
    incidents = [one for row in stairs for one in row["incidents"]]
    if stairs:
        made["staircases_count"] = len(stairs)
        made["staircase_confirmed_count"] = sum(one["confirmed"] for one in incidents)
        made["staircase_subsided_count"] = sum(one["waits"] == "Subsided" for one in incidents)
        made["staircase_actions_count"] = sum(one["actions"] for one in incidents)
    made |= _kills(_of(every, "kill"))
    made |= _restarts(_of(every, "leak_restart"))
    made["failed_steps_count"] = len(_of(every, "failed"))
    return {key: value for key, value in made.items() if value is not None}


def passed(rows: Iterable[Row]) -> list[tuple[str, float | None, str]]:
    """What the table of conformance says: case, slowest seconds, and how often. A case that failed
    once is not there."""
    every = _kept(rows)
    made: list[tuple[str, float | None, str]] = []
    ready = [row["seconds"] for row in _of(every, "ready") if row["life"] == 1]
    if ready:
        made.append(("found while it starts", max(ready), f"until ready, {len(ready)} engines"))
    known = figures(every)
    if known.get("healthy_minutes") and not (
        known["healthy_confirmed_count"] or known["healthy_requests_failed_count"]
    ):
        minutes, count = known["healthy_minutes"], known["healthy_requests_count"]
        made.append(("quiet under load", None, f"{minutes:.1f} min in all, {count} requests"))
    lost_s = known.get("diagnosis_gap_lost_s")
    if lost_s is not None and not known["diagnosed_health_failed_count"]:
        told = (
            f"{known['diagnoses_count']} times; the longest wait for a token was at most "
            f"{lost_s * 1000:.0f} ms longer than without a diagnosis"
        )
        made.append(("trim and diagnosis of all processes", known["diagnosis_s"], told))
    stairs = known.get("staircases_count")
    if stairs and known["staircase_confirmed_count"] == known["staircase_subsided_count"]:
        confirmed = known["staircase_confirmed_count"]
        told = f"{stairs} times; confirmed: {confirmed}, Subsided after its end: {confirmed}"
        made.append(("device memory in steps to half of the budget", None, told))
    named: dict[str, Callable[[Row], str]] = {
        "leak": lambda row: f"leak of 2 MiB/s in {row['part']}, {row['memory']} memory",
        "stall": lambda row: (
            f"{'frontend ' if row.get('part') == 'frontend' else ''}stall, {row['how']}, after "
            f"{row['served_s']:.0f} s of service"
        ),
        "kill": lambda row: f"{row['part']} killed",
    }
    for case, title in named.items():
        for name in sorted({title(row) for row in _of(every, case)}):
            same = [row for row in _of(every, case) if title(row) == name]
            if any(row["seconds"] is None or row.get("left") for row in same):
                continue
            if any(row["seconds"] > _bound_s(row) for row in same):
                continue
            told = "until no process of it was left, " if case == "kill" else ""
            often = "once" if len(same) == 1 else f"{len(same)} times"
            made.append((name, max(row["seconds"] for row in same), told + often))
    return made


def load_average(rows: Iterable[Row]) -> str | None:
    """The least and the most load of the machine when the rows were written; None of rows that do
    not say."""
    known = [row["load_1min"] for row in rows if "load_1min" in row]
    return f"{min(known):.0f} to {max(known):.0f}" if known else None


def _kept(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "set_apart" not in row]


def _bound_s(row: Row) -> float:
    """The longest time with which a case passes; kills have the limit of the case alone."""
    if row["case"] == "stall":
        return STALL_S if row["served_s"] >= SERVED_S else YOUNG_STALL_S
    return LEAK_S if row["case"] == "leak" else math.inf


def _restarts(rows: list[Row]) -> dict[str, float | int | None]:
    if not rows:
        return {}
    answers = [(status, n) for row in rows for status, n in row["answers"].items()]
    return {
        "leak_restarts_count": sum(row["restarted"] for row in rows),
        "requests_count": sum(n for _, n in answers),
        "requests_failed_count": sum(n for status, n in answers if status != "200"),
    }


def _of(rows: list[Row], case: str) -> list[Row]:
    return [row for row in rows if row["case"] == case]


def _healthy(name: str, rows: list[Row]) -> dict[str, float | int | None]:
    rows = [row for row in rows if not row.get("injected")]
    if not rows:
        return {}
    # An incident stays: the newest row that has it says what became of it.
    incidents = {(row["replica"], one["name"]): one for row in rows for one in row["incidents"]}
    return {
        f"{name}_minutes": sum(row["seconds"] for row in rows) / 60,
        f"{name}_requests_count": sum(row["answers"].get("200", 0) for row in rows),
        f"{name}_requests_failed_count": sum(
            count for row in rows for status, count in row["answers"].items() if status != "200"
        ),
        f"{name}_suspicions_count": len(incidents),
        f"{name}_confirmed_count": sum(one["confirmed"] for one in incidents.values()),
        f"{name}_actions_count": sum(one["actions"] for one in incidents.values()),
    }


def _throughput(rows: list[Row]) -> dict[str, float | int | None]:
    if len(rows) < 2:
        return {}
    mean, low, high = interval([lost(row["asked_tok_s"], row["unasked_tok_s"]) for row in rows])
    return {
        "probe_pairs_count": len(rows),
        "probe_loss_ratio": mean,
        "probe_loss_ratio_low": low,
        "probe_loss_ratio_high": high,
        "throughput_tok_s": statistics.fmean(row["unasked_tok_s"] for row in rows),
    }


def _confirmed(name: str, rows: list[Row]) -> dict[str, float | int | None]:
    """The slowest of those that were confirmed, and how many were not."""
    if not rows:
        return {}
    known = [row["seconds"] for row in rows if row["seconds"] is not None]
    return {
        f"{name}_confirm_s": max(known, default=None),
        f"{name}_confirmed_count": len(known),
        f"{name}_missed_count": len(rows) - len(known),
    }


def _diagnoses(rows: list[Row], memory: list[Row]) -> dict[str, float | int | None]:
    """What requests lost to a diagnosis, in seconds, and what the processes kept of it."""
    if len(rows) < 2:
        return {}
    mean, low, high = interval([row["diagnosed_s"] - row["undisturbed_s"] for row in rows])
    made: dict[str, float | int | None] = {
        "diagnoses_count": len(rows),
        "diagnosis_s": max(row["diagnosis_s"] for row in rows),
        "diagnosis_lost_s": mean,
        "diagnosis_lost_low_s": low,
        "diagnosis_lost_high_s": high,
        "diagnosis_gap_lost_s": max(
            row["diagnosed_gap_s"] - row["undisturbed_gap_s"] for row in rows
        ),
    }
    for kind in ("diagnosed", "undisturbed"):
        made |= {
            f"{kind}_request_p50_s": statistics.median(row[f"{kind}_s"] for row in rows),
            f"{kind}_gap_s": max(row[f"{kind}_gap_s"] for row in rows),
            f"{kind}_health_s": max(row[f"{kind}_health_s"] for row in rows),
            f"{kind}_health_count": sum(row[f"{kind}_health_count"] for row in rows),
            f"{kind}_health_failed_count": sum(row[f"{kind}_health_failed"] for row in rows),
        }
    if memory:
        made["diagnosis_grown_bytes"] = max(sum(row["grown_bytes"].values()) for row in memory)
    return made


def _kills(rows: list[Row]) -> dict[str, float | int | None]:
    if not rows:
        return {}
    made: dict[str, float | int | None] = {
        "orphan_processes_count": sum(row["left"] for row in rows),
        "all_ended_s": max(row["seconds"] for row in rows),
    }
    for part in sorted({row["part"] for row in rows}):
        made[f"{part}_kills_count"] = sum(row["part"] == part for row in rows)
    return made
