"""``plimsoll explain``: the story of an incident for the person on call."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from plimsoll_api.incident_story import Story
from plimsoll_api.names import POLICY_LABEL, SERVICE_LABEL
from plimsoll_api.units import format_bytes, format_span
from plimsoll_cli.incident_view import (
    IncidentView,
    format_state,
    format_step,
    format_target,
    truncate,
)
from plimsoll_cli.output import draw_area_chart

PROBLEMS_BY_KIND = {
    "HostGrowth": "host memory grew more than the engine's ledger explains",
    "DeviceGrowth": "device memory grew more than the engine's ledger explains",
    "OrphanDeviceMemory": "some of the device memory is held by no known process",
    "Stall": "requests waited, but the engine completed no steps",
    "OutOfMemoryKill": "the kernel killed the engine because it ran out of memory",
    "CapacityLoss": "KV blocks or encoder cache space belonged to no request",
    "EngineCrash": "the engine or its worker ended unexpectedly and was restarted",
    "CrashLoop": "a container keeps crashing",
    "Recycle": "the engine was healthy, but reached its maximum age",
    "ManualAction": "a person ran an action on the replica",
}
LABEL_WIDTH, MAX_WIDTH, CHART_HEIGHT = 9, 64, 5
"""Width of the axis labels, and maximum width and height of the chart, in characters."""
REPORT_HINT = "report the leak with the saved diagnostics: a restart only removes its effect."
NEXT_STEPS = {
    "Open": "wait: the supervisor first checks that the growth continues.",
    "Trimming": "wait: the supervisor first frees cached memory.",
    "Confirmed": "wait: the supervisor does nothing disruptive until the leak budget is spent.",
    "AwaitingSlot": "wait: the supervisor is waiting for the service's restart slot.",
    "Draining": "wait: the engine finishes its running requests before the restart.",
    "Restarting": "wait: streams pause until the new worker is ready, or until the operator has "
    "replaced the pod.",
    "Verifying": "wait: after warm-up, the supervisor compares memory with the baseline.",
    "Cleared": "nothing: the problem disappeared by itself.",
    "Trim": "nothing now. If memory grows again, the growth was fragmentation: see docs/tuning.md.",
    "WorkerRestart": REPORT_HINT,
    "EngineRestart": REPORT_HINT,
    "PodReplaced": "nothing now: a new pod took over. " + REPORT_HINT,
    "ContainerRestarted": "find out why it ended: kubectl logs {pod} -c {container} --previous, "
    "and Last State in kubectl describe pod {pod}",
    "WorkerRestarted": "find out why it ended: kubectl logs {pod} -c {container}",
    "Recovered": "nothing now: the container is ready again. Its previous log may explain the "
    "crash: kubectl logs {pod} -c {container} --previous",
    "PodGone": "nothing: the pod was deleted or replaced by someone else.",
    "ManualTrim": "nothing.",
    "ManualDrain": "when you are done, put it back into service: plimsoll resume {replica}",
    "ManualRestart": "nothing: the restart counts against the replica's restart budget.",
    "ManualResume": "nothing.",
    "Failed": "read the message above and the engine's log: kubectl logs {pod} -c {container}",
    "NewEpoch": "nothing: the engine was restarted by someone else.",
    "Observed": "set spec.supervision.mode: Recover to let the supervisor act, or act yourself: "
    "plimsoll restart {replica}",
    "RestartBudgetExhausted": "find the cause, then: plimsoll resume {replica}",
    "LadderExhausted": "allow more actions in spec.supervision.ladder, or replace the pod: "
    "kubectl delete pod {pod}",
    "PartlyReturned": "look for memory outside the engine: the segments shared and shared_orphan.",
    "SlotTimeout": "find out which pod holds the slot: kubectl get leases -l {slots}",
    "PartnerLost": "restart the pods of the other role, too: they may hold connections to the"
    " engine that has ended.",
    "Refused": "find out why the engine refused: kubectl logs {pod} -c {container}",
    "EffectUnknown": "compare the engine's epoch with the incident's: plimsoll doctor",
}
NEXT_STEPS_WHILE_WAITING = {
    "ServiceRestartBudgetExhausted": "find the cause. Restarts are possible again when the "
    "window has passed, or after: plimsoll resume {replica} "
    "--service",
    "ReplicaRestartBudgetExhausted": "find the cause, then: plimsoll resume {replica}",
    "SlotHeld": (
        "wait: another replica of the service is restarting. To see which one, run: kubectl get"
        " leases -l {slots}"
    ),
    "SlotConflict": "wait: another replica took the slot at the same moment.",
    "NoSlot": "wait until the operator has created the slot Leases. Check that the operator runs.",
    "CircuitBreaker": "wait: the operator's --max-disruptions limits how many services may restart "
    "at the same time.",
    "LastReadyReplica": "wait until another replica is ready, or add one.",
    "MaintenanceWindow": "wait: the restart happens in spec.supervision.maintenanceWindow, or "
    "earlier if memory would run out.",
    "ManuallyDrained": "end your maintenance, then: plimsoll resume {replica}",
    "Subsided": "nothing now: memory has stopped growing, or its growth looks less like a leak "
    "than before. The supervisor acts if the growth continues.",
    "APIServerUnreachable": "check that the pod can reach the API server: kubectl logs {pod}"
    " -c supervisor",
    "RestartCountUnreadable": (
        "the slot Lease was edited by someone else. Reset its counts: plimsoll resume {replica}"
        " --service"
    ),
}
NEXT_STEPS_BY_KIND = {
    "OutOfMemoryKill": "raise the memory limit of {container}, or find out what grew before: "
    "plimsoll incidents {target}",
    "CrashLoop": "find out why it crashes: kubectl logs {pod} -c {container} --previous",
    "Recycle": (
        "nothing: spec.supervision.recycle requests this restart. It waits until a slot is free"
        " and another replica is ready."
    ),
}
"""Next steps for kinds of incidents that the supervisor cannot resolve, in any phase."""
LOCAL_LOG_HINT = "read the engine's output."
LOCAL_NEXT_STEPS = {
    "Observed": "let the supervisor act: plimsoll watch --recover -- COMMAND, or "
    "spec.supervision.mode: Recover in the service's manifest.",
    "LadderExhausted": "restart the engine yourself, or allow more actions in "
    "spec.supervision.ladder of its manifest.",
    "ContainerRestarted": LOCAL_LOG_HINT,
    "WorkerRestarted": LOCAL_LOG_HINT,
    "Recovered": "nothing now: the engine is ready again. " + LOCAL_LOG_HINT,
    "Failed": "read the message above. " + LOCAL_LOG_HINT,
    "Refused": LOCAL_LOG_HINT,
}
"""Next steps that replace those in :data:`NEXT_STEPS` for an engine on this machine."""


def choose_next_step(incident: IncidentView) -> str:
    """Return what a person should do next."""
    spec, status = incident.spec, incident.status
    key, here = status.outcome or incident.story.phase, not incident.namespace
    known = (LOCAL_NEXT_STEPS if here and key in LOCAL_NEXT_STEPS else NEXT_STEPS).get(
        key, "see the message above."
    )
    if spec.kind in NEXT_STEPS_BY_KIND and status.outcome not in ("Recovered", "PodGone"):
        known = NEXT_STEPS_BY_KIND[spec.kind]
    elif status.waiting_reason is not None:
        known = NEXT_STEPS_WHILE_WAITING.get(status.waiting_reason, known)
    slots = (
        (POLICY_LABEL, spec.policy_ref.name)
        if spec.policy_ref
        else (SERVICE_LABEL, spec.workload_ref.name)
    )
    return known.format(
        pod=spec.pod,
        replica=f"{spec.pod} --local" if here else spec.pod,
        target=f"{format_target(incident)} --local" if here else format_target(incident),
        container=spec.container,
        slots="=".join(slots),
    )


def format_lines(incident: IncidentView, width: int, ascii_only: bool = False) -> Iterator[Text]:
    """Yield the lines of the story.

    Charts and steps fit into ``width`` columns; sentences may be longer.
    """
    spec, story = incident.spec, incident.story
    yield Text.assemble((incident.name, "bold"), "  ", format_state(story))
    yield Text(f"{story.kind}: {PROBLEMS_BY_KIND.get(spec.kind, 'a problem')}.")
    role = f" ({spec.target.role})" if spec.target is not None else ""
    yield Text(f"{_format_owner(incident)}, pod {spec.pod}{role}, epoch {spec.epoch}.")
    lasted = ""
    if story.ended_at is not None:
        span = format_span(story.ended_at - story.opened_at)
        lasted = f", ended {incident.status.ended_at} after {span}"
    yield Text(f"Opened {spec.opened_at}{lasted}.")
    yield from _format_evidence(story)
    yield from _format_chart(story, width, ascii_only)
    yield from _format_actions(story, width, ascii_only)
    if story.returned_bytes is not None:
        yield Text(f"\nFreed: {format_bytes(story.returned_bytes)}.", style="bold")
    if story.message:
        yield Text(f"{'Result' if story.has_ended else 'Now'}: {story.message}")
    folders: dict[str, list[str]] = {}
    for file in story.diagnostics:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    for folder, names in folders.items():
        yield Text(f"Saved in {folder or '.'}: {', '.join(names)}")
    yield Text.assemble(("\nWhat next: ", "bold"), choose_next_step(incident))


def _format_owner(incident: IncidentView) -> str:
    spec, space = incident.spec, f"{incident.namespace}/" if incident.namespace else ""
    workload = spec.workload_ref
    if spec.policy_ref is None:
        return f"Service {space}{workload.name}"
    group = f", group {spec.pod_group}" if spec.pod_group is not None else ""
    policy = f"SupervisionPolicy {spec.policy_ref.name}"
    return f"{workload.kind} {space}{workload.name}{group} ({policy})"


def print_story(incident: IncidentView, console: Console, ascii_only: bool) -> None:
    """Print the story of an incident."""
    for line in format_lines(incident, console.width, ascii_only):
        console.print(line, soft_wrap=True)


def _format_evidence(story: Story) -> Iterator[Text]:
    seen = story.attribution
    if seen.bytes and seen.bytes > 0:
        grew = ", ".join([f"{format_bytes(seen.bytes)}{story.location}", *story.rates])
        yield Text(f"\nGrew: {grew}.", style="bold")
        spent = (
            "" if story.spent_percent is None else f"Leak budget spent: {story.spent_percent} %. "
        )
        yield Text(f"{spent}Confidence: {seen.confidence_percent or 0} %.")
    for sentence in seen.evidence:
        yield Text(f"Evidence: {sentence}")


def _format_chart(story: Story, width: int, ascii_only: bool) -> Iterator[Text]:
    points = story.memory
    if len(points) < 2:
        return
    drawn = draw_area_chart(
        points, max(8, min(MAX_WIDTH, width - LABEL_WIDTH - 4)), CHART_HEIGHT, ascii_only
    )
    if not drawn:
        return
    sizes = [size for _, size in points]
    labels = {0: format_bytes(max(sizes)), CHART_HEIGHT - 1: format_bytes(min(sizes))}
    yield Text("\nMemory of the replica, from step to step:")
    for row, line in enumerate(drawn):
        edge = "|" if ascii_only else "│"
        yield Text.assemble((f"{labels.get(row, ''):>{LABEL_WIDTH}} {edge}", "dim"), (line, "cyan"))
    ends = f"+{format_span(points[0][0])}", f"+{format_span(points[-1][0])}"
    gap = max(1, len(max(drawn, key=len)) - len(ends[0]) - len(ends[1]))
    yield Text(f"{'':>{LABEL_WIDTH}}  {ends[0]}{' ' * gap}{ends[1]}", style="dim")


def _format_actions(story: Story, width: int, ascii_only: bool) -> Iterator[Text]:
    if not story.steps:
        yield Text("\nNo action has been tried yet.")
        return
    yield Text("\nWhat was tried:", style="bold")
    for step in story.steps:
        start = f"+{format_span(step.at - story.opened_at):<7} {step.name:<14} "
        yield truncate(format_step(start, step, width=10), width, ascii_only)
