"""``plimsoll explain``: the story of an incident for the person on call."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from plimsoll_api.incident_story import Story
from plimsoll_api.names import POLICY_LABEL, SERVICE_LABEL
from plimsoll_api.units import format_bytes, format_span
from plimsoll_cli.incident_view import IncidentView, state_text, step_line, target, truncate
from plimsoll_cli.output import plot

WHAT = {
    "HostGrowth": "host memory grew beyond what the engine's ledger explains",
    "DeviceGrowth": "device memory grew beyond what the engine's ledger explains",
    "OrphanDeviceMemory": "device memory is held by no known process",
    "Stall": "requests waited, but the engine completed no step",
    "OutOfMemoryKill": "the kernel killed the engine because it ran out of memory",
    "CapacityLoss": "KV blocks or encoder cache space belonged to no request",
    "EngineCrash": "the engine or its worker ended unexpectedly and was restarted",
    "CrashLoop": "a container keeps crashing",
    "Recycle": "the healthy engine has reached the age at which you want it restarted",
    "ManualAction": "a person ran an action on the replica",
}
LABEL_WIDTH, MAX_WIDTH, HEIGHT = 9, 64, 5
"""Width of the axis labels, maximum width, and height of the chart."""
REPORT = "report the leak with the saved diagnostics: a restart only removes its effect."
NEXT = {
    "Open": "wait: the supervisor first checks that the growth continues.",
    "Trimming": "wait: the supervisor first returns cached memory.",
    "Confirmed": "wait: the supervisor takes no disruptive action before the budget is spent.",
    "AwaitingSlot": "wait: the supervisor is taking the service's restart slot.",
    "Draining": "wait: the engine drains its requests before the restart.",
    "Restarting": "wait: streams pause until the new worker is ready, or until the operator has"
    " replaced the pod.",
    "Verifying": "wait: after warm-up, the supervisor compares memory with the baseline.",
    "Cleared": "nothing: the symptom disappeared by itself.",
    "Trim": "nothing at once. If it comes back, the growth was fragmentation: see docs/tuning.md.",
    "WorkerRestart": REPORT,
    "EngineRestart": REPORT,
    "PodReplaced": "nothing at once: a new pod took over. " + REPORT,
    "ContainerRestarted": "find out how it ended: kubectl logs {pod} -c {container} --previous, and"
    " Last State in kubectl describe pod {pod}",
    "WorkerRestarted": "find out how it ended: kubectl logs {pod} -c {container}",
    "Recovered": "nothing at once: the container is ready again. Its last log may say more:"
    " kubectl logs {pod} -c {container} --previous",
    "PodGone": "nothing: someone else deleted or replaced the pod.",
    "ManualTrim": "nothing.",
    "ManualDrain": "put it back into service when you are done: plimsoll resume {replica}",
    "ManualRestart": "nothing: the restart counts against the replica's restart budget.",
    "ManualResume": "nothing.",
    "Failed": "the message above says why; the engine's log may say more: kubectl logs {pod}"
    " -c {container}",
    "NewEpoch": "nothing: someone else restarted the engine.",
    "Observed": "set spec.supervision.mode: Recover to let the supervisor act, or act manually:"
    " plimsoll restart {replica}",
    "RestartBudgetExhausted": "find the cause, then: plimsoll resume {replica}",
    "LadderExhausted": "allow more in spec.supervision.ladder, or replace the pod:"
    " kubectl delete pod {pod}",
    "PartlyReturned": "look for memory outside the engine (segments shared and orphan).",
    "SlotTimeout": "see who holds the slot: kubectl get leases -l {slots}",
    "PartnerLost": "restart the pods of the other role, too: they may hold connections to the"
    " engine that has ended.",
    "Refused": "the engine's log says why it refused: kubectl logs {pod} -c {container}",
    "EffectUnknown": "compare the engine's epoch with the incident's: plimsoll doctor",
}
WAITS = {
    "ServiceRestartBudgetExhausted": "find the cause. Restarts resume as the window passes, or"
    " after: plimsoll resume {replica} --service",
    "ReplicaRestartBudgetExhausted": "find the cause, then: plimsoll resume {replica}",
    "SlotHeld": "wait: another replica of the service restarts. To see which one:"
    " kubectl get leases -l {slots}",
    "SlotConflict": "wait: another replica took the slot at the same moment.",
    "NoSlot": "wait until the operator has created the slot Leases. Check that it runs.",
    "CircuitBreaker": "wait: the number of services that restart has reached the operator's"
    " --max-disruptions.",
    "LastReadyReplica": "wait until another replica is ready, or add one.",
    "MaintenanceWindow": "wait: it restarts in spec.supervision.maintenanceWindow, or earlier if"
    " memory would run out before.",
    "ManuallyDrained": "end your maintenance, then: plimsoll resume {replica}",
    "Subsided": "nothing now: the growth looks less like a leak than when it was confirmed. The"
    " incident ends with the growth. It acts if the odds rise again.",
    "APIServerUnreachable": "check that the pod can reach the API server: kubectl logs {pod}"
    " -c supervisor",
    "RestartCountUnreadable": "someone else edited the slot Lease. Clear its counts:"
    " plimsoll resume {replica} --service",
}
NEXT_BY_KIND = {
    "OutOfMemoryKill": "raise the memory limit of {container}, or find out what grew before:"
    " plimsoll incidents {target}",
    "CrashLoop": "its last log says why: kubectl logs {pod} -c {container} --previous",
    "Recycle": "nothing: spec.supervision.recycle asks for it. It waits until a slot is free and"
    " another replica is ready.",
}
"""Next steps for kinds that no action of the supervisor fixes, in any phase."""
LOCAL_LOG = "the engine's output says more."
NEXT_LOCAL = {
    "Observed": "let the supervisor act: plimsoll watch --recover -- COMMAND, or"
    " spec.supervision.mode: Recover in the service's manifest.",
    "LadderExhausted": "restart the engine yourself, or allow more in spec.supervision.ladder of"
    " its manifest.",
    "ContainerRestarted": LOCAL_LOG,
    "WorkerRestarted": LOCAL_LOG,
    "Recovered": "nothing at once: the engine is ready again. " + LOCAL_LOG,
    "Failed": "the message above says why. " + LOCAL_LOG,
    "Refused": LOCAL_LOG,
}
"""Next steps that replace :data:`NEXT` for an engine on this machine, which has no pod."""


def next_step(incident: IncidentView) -> str:
    """Return what a person should do next."""
    spec, status = incident.spec, incident.status
    key, here = status.outcome or incident.story.phase, not incident.namespace
    known = (NEXT_LOCAL if here and key in NEXT_LOCAL else NEXT).get(key, "see the message above.")
    if spec.kind in NEXT_BY_KIND and status.outcome not in ("Recovered", "PodGone"):
        known = NEXT_BY_KIND[spec.kind]
    elif status.waiting_reason is not None:
        known = WAITS.get(status.waiting_reason, known)
    slots = (
        (POLICY_LABEL, spec.policy_ref.name)
        if spec.policy_ref
        else (SERVICE_LABEL, spec.workload_ref.name)
    )
    return known.format(
        pod=spec.pod,
        replica=f"{spec.pod} --local" if here else spec.pod,
        target=f"{target(incident)} --local" if here else target(incident),
        container=spec.container,
        slots="=".join(slots),
    )


def lines(incident: IncidentView, width: int, plain: bool = False) -> Iterator[Text]:
    """Yield the lines of the story. Only sentences may exceed ``width`` columns."""
    spec, story = incident.spec, incident.story
    yield Text.assemble((incident.name, "bold"), "  ", state_text(story))
    yield Text(f"{story.kind}: {WHAT.get(spec.kind, 'something went wrong')}.")
    role = f" ({spec.target.role})" if spec.target is not None else ""
    yield Text(f"{_owner(incident)}, pod {spec.pod}{role}, epoch {spec.epoch}.")
    lasted = ""
    if story.ended_at is not None:
        span = format_span(story.ended_at - story.opened_at)
        lasted = f", ended {incident.status.ended_at} after {span}"
    yield Text(f"Opened {spec.opened_at}{lasted}.")
    yield from _evidence_lines(story)
    yield from _chart_lines(story, width, plain)
    yield from _action_lines(story, width, plain)
    if story.returned_bytes is not None:
        yield Text(f"\nCame back: {format_bytes(story.returned_bytes)}.", style="bold")
    if story.message:
        yield Text(f"{'Result' if story.ended else 'Now'}: {story.message}")
    folders: dict[str, list[str]] = {}
    for file in story.diagnostics:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    for folder, names in folders.items():
        yield Text(f"Saved in {folder or '.'}: {', '.join(names)}")
    yield Text.assemble(("\nWhat next: ", "bold"), next_step(incident))


def _owner(incident: IncidentView) -> str:
    """Return the service, or a policy's workload: ``Deployment ml/vllm (SupervisionPolicy x)``."""
    spec, space = incident.spec, f"{incident.namespace}/" if incident.namespace else ""
    workload = spec.workload_ref
    if spec.policy_ref is None:
        return f"Service {space}{workload.name}"
    group = f", group {spec.pod_group}" if spec.pod_group is not None else ""
    policy = f"SupervisionPolicy {spec.policy_ref.name}"
    return f"{workload.kind} {space}{workload.name}{group} ({policy})"


def show(incident: IncidentView, out: Console, plain: bool) -> None:
    """Print the story of an incident."""
    for line in lines(incident, out.width, plain):
        out.print(line, soft_wrap=True)


def _evidence_lines(story: Story) -> Iterator[Text]:
    seen = story.seen
    if seen.bytes and seen.bytes > 0:
        grew = ", ".join([f"{format_bytes(seen.bytes)}{story.where}", *story.rates])
        yield Text(f"\nGrew: {grew}.", style="bold")
        spent = (
            "" if story.spent_percent is None else f"Leak budget spent: {story.spent_percent} %. "
        )
        yield Text(f"{spent}Confidence: {seen.confidence_percent or 0} %.")
    for sentence in seen.evidence:
        yield Text(f"Evidence: {sentence}")


def _chart_lines(story: Story, width: int, plain: bool) -> Iterator[Text]:
    points = story.memory
    if len(points) < 2:
        return
    drawn = plot(points, max(8, min(MAX_WIDTH, width - LABEL_WIDTH - 4)), HEIGHT, plain)
    if not drawn:
        return
    sizes = [size for _, size in points]
    labels = {0: format_bytes(max(sizes)), HEIGHT - 1: format_bytes(min(sizes))}
    yield Text("\nMemory of the replica, from step to step:")
    for row, line in enumerate(drawn):
        edge = "|" if plain else "│"
        yield Text.assemble((f"{labels.get(row, ''):>{LABEL_WIDTH}} {edge}", "dim"), (line, "cyan"))
    ends = f"+{format_span(points[0][0])}", f"+{format_span(points[-1][0])}"
    gap = max(1, len(max(drawn, key=len)) - len(ends[0]) - len(ends[1]))
    yield Text(f"{'':>{LABEL_WIDTH}}  {ends[0]}{' ' * gap}{ends[1]}", style="dim")


def _action_lines(story: Story, width: int, plain: bool) -> Iterator[Text]:
    if not story.steps:
        yield Text("\nNo action has been tried yet.")
        return
    yield Text("\nWhat was tried:", style="bold")
    for step in story.steps:
        start = f"+{format_span(step.at - story.opened_at):<7} {step.name:<14} "
        yield truncate(step_line(start, step, width=10), width, plain)
