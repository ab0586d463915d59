"""Write the demo's story as text, and the files of its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from plimsoll_api.incident_record import IncidentRecord
from plimsoll_api.incident_story import StoryStep, make_record_story
from plimsoll_api.supervision import Action
from plimsoll_api.units import format_bytes
from plimsoll_cli.demo.evidence import Observations, find_cured_incident, find_pauses, find_restarts
from plimsoll_cli.figures import make_result

RESULT_NAME = "demo"
MIN_JUDGED_SHARE = 0.9
"""Share of the growth below which the story says why the budget counts less."""
REMEDIATION_STEPS = frozenset(Action)

Results = dict[str, float | int | None]


def format_story(service: str, observed: Observations, values: Results, problems: list[str]) -> str:
    """Return the story as text, with times in seconds since the first request."""
    start = observed.times.traffic_from
    lines = [
        f"The service {service} answered {values['requests_count']} requests on "
        f"{observed.streams} concurrent streams.",
    ]
    for incident in sorted(observed.incidents, key=lambda one: one.opened_at):
        lines += ["", *_format_incident(incident, start)]
    lines += ["", *_format_outcome(observed, values)]
    lines += ["", *(f"MISSING: {line}" for line in problems)] if problems else []
    return "\n".join(lines) + "\n"


def _format_incident(incident: IncidentRecord, start: float) -> list[str]:
    story = make_record_story(incident)
    lines = [f"Incident {incident.name} in epoch {incident.epoch}: {story.headline}"]
    events = [(incident.opened_at, "incident opened")]
    events += [(step.at, _format_step(step)) for step in story.steps]
    if incident.confirmed_at is not None:
        events.append((incident.confirmed_at, "leak confirmed"))
    if incident.ended_at is not None:
        reason = f" by {incident.reason.value}" if incident.reason else ""
        returned = incident.returned_bytes
        gave = f": {format_bytes(returned)} freed" if returned is not None else ""
        events.append((incident.ended_at, f"{incident.phase.value.lower()}{reason}{gave}"))
    lines += [f"  {at - start:+7.1f} s  {what}" for at, what in sorted(events)]
    return lines + [f"  evidence: {line}" for line in incident.attribution.evidence]


def _format_step(step: StoryStep) -> str:
    change = step.memory_change if step.name in REMEDIATION_STEPS else ""
    details = [part for part in (change, step.message.replace("\n", " ")) if part]
    rest = f": {', '.join(details)}" if details else ""
    return f"{step.name} {step.outcome.lower()}{rest}"


def _format_outcome(observed: Observations, values: Results) -> list[str]:
    lines = [
        (
            f"{values['streams_broken_count']} streams broke, {values['requests_failed_count']}"
            f" requests failed, and {values['texts_different_count']} replies differ from the text"
            " of the run without the leak."
        ),
    ]
    p50, p99 = values["pause_p50_s"], values["pause_p99_s"]
    if p50 is not None and p99 is not None:
        lines.append(
            f"The restart interrupted {values['streams_carried_count']} streams. The median pause"
            f" was {p50:.2f} s, and the 99th percentile {p99:.2f} s."
        )
    base, after = values["memory_baseline_bytes"], values["memory_after_bytes"]
    if base is not None and after is not None:
        lines.append(
            f"Idle memory was {format_bytes(base)} before the traffic and {format_bytes(after)}"
            " after it."
        )
    growth, returned = values.get("growth_bytes"), values.get("returned_bytes")
    if growth is not None and returned is not None:
        lines.append(
            f"Memory grew by {format_bytes(growth)}; the restart freed {format_bytes(returned)}."
        )
        judged = values.get("judged_growth_bytes")
        if judged is not None and judged < MIN_JUDGED_SHARE * growth:
            lines.append(
                f"Of this growth, {format_bytes(judged)} count against the leak budget. The rest"
                " came while the load was new, which explains growth."
            )
    device_before, device_after = values["device_baseline_bytes"], values["device_after_bytes"]
    if device_before is not None and device_after is not None:
        same = "equal exactly" if device_before == device_after else "not equal"
        lines.append(
            f"Device memory was {device_before} bytes before the traffic and {device_after} bytes"
            f" after it: {same}."
        )
    seconds = values.get("detect_to_resolved_s")
    if find_cured_incident(observed.incidents) is not None and seconds is not None:
        lines.append(f"The incident lasted {seconds:.1f} s.")
    return lines


def write_report(
    out: Path,
    observed: Observations,
    values: Results,
    problems: list[str],
    service: str,
    budget_bytes: int | None,
    command: list[str],
) -> str:
    """Write ``report.json``, ``incident.json``, ``memory.png`` and ``story.txt``; return the story.

    The trace must already exist in ``out``. Raises OSError.
    """
    from plimsoll_cli.demo import picture  # importing matplotlib takes a second

    report = make_result(RESULT_NAME, values, command, _collect_samples(observed))
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    incident = find_cured_incident(observed.incidents) or next(iter(observed.incidents), None)
    body = msgspec.json.format(msgspec.json.encode(incident), indent=2)
    (out / "incident.json").write_bytes(body + b"\n")
    text = format_story(service, observed, values, problems)
    (out / "story.txt").write_text(text)
    picture.draw_chart(
        out / "memory.png", f"host memory and streams of service {service}", observed, budget_bytes
    )
    return text


def _collect_samples(observed: Observations) -> dict[str, Any]:
    windows = find_restarts(observed.incidents)
    start = observed.times.traffic_from
    return {
        "pauses_s": [round(gap, 4) for gap in sorted(find_pauses(observed.replies, windows))],
        "worker_restarts_s": [[round(a - start, 3), round(b - start, 3)] for a, b in windows],
        "incidents": [incident.name for incident in observed.incidents],
    }
