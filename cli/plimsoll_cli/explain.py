"""``plimsoll explain``: the story of one incident, for whoever is on call."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from plimsoll_api.units import format_bytes
from plimsoll_cli.spark import plot
from plimsoll_cli.told import Told, seconds
from plimsoll_sidecar.record.incident import IncidentStep

WHAT = {
    "HostGrowth": "host memory grew beyond what the engine's ledger explains",
    "DeviceGrowth": "device memory grew beyond what the engine's ledger explains",
    "OrphanDeviceMemory": "device memory is held by no known process",
    "Stall": "requests waited and the engine made no step",
    "OutOfMemoryKill": "the kernel killed the engine for its memory",
    "CapacityLoss": "KV blocks or room for encoder outputs were held by no request",
}
LABEL, WIDEST, HEIGHT = 9, 64, 5
"""Columns of a size, most columns and the lines of the picture."""
REPORT = "report the leak with the saved diagnostics: a restart cures its effect only."
NEXT = {
    "Open": "wait: the supervisor first makes sure that the growth goes on.",
    "Trimming": "wait: memory that is merely cached is being given back first.",
    "Confirmed": "wait: something disruptive follows only when the budget is spent.",
    "AwaitingSlot": "wait: another replica holds the service's restart slot.",
    "Draining": "wait: running requests finish before the engine is restarted.",
    "Restarting": "wait: streams pause until the new worker is there, or until the operator has"
    " replaced the pod.",
    "Verifying": "wait: memory is compared with the baseline after warm-up.",
    "Cleared": "nothing: the suspicion went away by itself.",
    "Trim": "nothing at once. If it comes back, the growth was fragmentation: see docs/tuning.md.",
    "WorkerRestart": REPORT,
    "EngineRestart": REPORT,
    "PodReplaced": "nothing at once: a new pod took over. " + REPORT,
    "NewEpoch": "nothing: the engine was started anew by somebody else.",
    "Observed": "set spec.supervision.mode: Recover to let the supervisor act, or act by hand:"
    " plimsoll restart {pod}",
    "RestartBudgetExhausted": "find the cause, then: plimsoll resume {pod}",
    "LadderExhausted": "allow more in spec.supervision.ladder, or replace the pod:"
    " kubectl delete pod {pod}",
    "PartlyReturned": "look for memory outside of the engine (segments shared and orphan).",
    "SlotTimeout": "see who holds the slot: kubectl get leases -l plimsoll.dev/service={service}",
    "Refused": "the engine's log says why it refused: kubectl logs {pod} -c engine",
    "EffectUnknown": "compare the engine's epoch with the incident's: plimsoll doctor",
}
STYLE = {
    "Succeeded": "green", "Failed": "red", "Refused": "red", "Begun": "yellow",
    "Requested": "yellow",
    "Resolved": "bold green", "Unresolved": "bold red", "Suppressed": "bold magenta",
}  # fmt: skip


def next_step(told: Told) -> str:
    """What a person does now."""
    known = NEXT.get(told.status.outcome or told.status.phase, "look at the message above.")
    return known.format(pod=told.spec.pod, service=told.spec.service)


def memory(told: Told) -> list[tuple[float, int]]:
    """What is known of the replica's memory: seconds since the incident opened, and bytes."""
    opened, points = seconds(told.spec.opened_at) or 0.0, []
    for step in told.status.timeline:
        at = (seconds(step.time) or opened) - opened
        if step.outcome == "Begun":
            continue
        points += [(at, size) for size in (step.before_bytes, step.after_bytes) if size is not None]
    ended = seconds(told.status.ended_at)
    if points and ended is not None and ended - opened > points[-1][0]:
        points.append((ended - opened, points[-1][1]))  # what was verified at the end
    return points


def lines(told: Told, width: int, plain: bool = False) -> Iterator[Text]:
    """The story, each line cut to ``width`` columns but for sentences, which are whole."""
    spec, status = told.spec, told.status
    yield Text.assemble(
        (told.name, "bold"), "  ", (status.phase, STYLE.get(status.phase, "bold yellow")),
        f" ({status.outcome})" if status.outcome else "",
    )  # fmt: skip
    where = f"{told.namespace}/{spec.service}" if told.namespace else spec.service
    yield Text(f"{spec.kind}: {WHAT.get(spec.kind, 'something went wrong')}.")
    yield Text(f"Service {where}, pod {spec.pod}, epoch {spec.epoch}.")
    yield Text(f"Opened {spec.opened_at}{_lasted(told)}.")
    yield from _seen(told)
    yield from _picture(told, width, plain)
    yield from _tried(told, width, plain)
    if status.returned_bytes is not None:
        yield Text(f"\nCame back: {format_bytes(status.returned_bytes)}.", style="bold")
    if status.message:
        yield Text(f"Said at the end: {status.message}")
    folders: dict[str, list[str]] = {}
    for file in status.diagnostics:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    for folder, names in folders.items():
        yield Text(f"Saved in {folder or '.'}: {', '.join(names)}")
    yield Text.assemble(("\nWhat next: ", "bold"), next_step(told))


def show(told: Told, out: Console, plain: bool) -> None:
    for line in lines(told, out.width, plain):
        out.print(line, soft_wrap=True)


def _lasted(told: Told) -> str:
    begin, end = seconds(told.spec.opened_at), seconds(told.status.ended_at)
    if begin is None or end is None:
        return ""
    return f", ended {told.status.ended_at} after {span(end - begin)}"


def span(value: float) -> str:
    """``45 s``, ``12 min``, ``3 h``, ``4 d``."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if value < most:
            return f"{value / size:.0f} {unit}"
    return f"{value / 86_400:.0f} d"


def _seen(told: Told) -> Iterator[Text]:
    seen = told.status.attribution
    where = f" in {seen.segment}" if seen.segment else ""
    where += f" of the {seen.process}" if seen.process else ""
    if seen.bytes:
        rate = f", {format_bytes(seen.bytes_per_hour)} an hour" if seen.bytes_per_hour else ""
        each = seen.bytes_per_request
        rate += f", {format_bytes(each)} a request" if each else ""
        yield Text(f"\nGrew: {format_bytes(seen.bytes)}{where}{rate}.", style="bold")
        spent = told.status.consumed_percent
        yield Text(f"Leak budget spent: {spent} %. Confidence: {seen.confidence:.0%}.")
    for sentence in seen.evidence:
        yield Text(f"Evidence: {sentence}")


def _picture(told: Told, width: int, plain: bool) -> Iterator[Text]:
    points = memory(told)
    if len(points) < 2:
        return
    drawn = plot(points, max(8, min(WIDEST, width - LABEL - 4)), HEIGHT, plain)
    if not drawn:
        return
    sizes = [size for _, size in points]
    labels = {0: format_bytes(max(sizes)), HEIGHT - 1: format_bytes(min(sizes))}
    yield Text("\nMemory of the replica, from step to step:")
    for row, line in enumerate(drawn):
        edge = "|" if plain else "│"
        yield Text.assemble((f"{labels.get(row, ''):>{LABEL}} {edge}", "dim"), (line, "cyan"))
    ends = f"+{span(points[0][0])}", f"+{span(points[-1][0])}"
    gap = max(1, len(max(drawn, key=len)) - len(ends[0]) - len(ends[1]))
    yield Text(f"{'':>{LABEL}}  {ends[0]}{' ' * gap}{ends[1]}", style="dim")


def _tried(told: Told, width: int, plain: bool) -> Iterator[Text]:
    if not told.status.timeline:
        yield Text("\nNothing was tried yet.")
        return
    yield Text("\nWhat was tried:", style="bold")
    opened = seconds(told.spec.opened_at) or 0.0
    for step in told.status.timeline:
        line = _step(step, opened)
        if line.cell_len > width:
            line.truncate(width - 3 if plain else width, overflow="crop" if plain else "ellipsis")
            line.append("..." if plain else "")
        yield line


def _step(step: IncidentStep, opened: float) -> Text:
    after = (seconds(step.time) or opened) - opened
    change = ""
    if step.before_bytes is not None and step.after_bytes is not None:
        given = step.before_bytes - step.after_bytes
        sizes = f"{format_bytes(step.before_bytes)} -> {format_bytes(step.after_bytes)}"
        change = f"{sizes} ({format_bytes(given)} back)" if given > 0 else sizes
    text = (step.message or "").replace("\n", " ")
    return Text.assemble(
        f"  +{span(after):<7} {step.step:<14} ",
        (f"{step.outcome:<10}", STYLE.get(step.outcome, "")),
        "  ".join(part for part in (change, text) if part),
    )  # fmt: skip
