"""``plimsoll incidents``: list the incidents of a cluster or of this machine."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.text import Text

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.incident_record import JOURNAL_FILE, IncidentRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.names import INCIDENT_PLURAL, POLICY_KIND, POLICY_LABEL, SERVICE_LABEL
from plimsoll_api.units import format_bytes
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.incident_view import (
    OPEN_STATE_STYLE,
    STYLE_BY_STATE,
    IncidentView,
    UnreadableError,
    format_target,
    make_view_from_journal,
    make_view_from_object,
    matches_target,
)
from plimsoll_cli.local import run_dir as folders
from plimsoll_cli.output import Cell, Output, fit_columns, make_console, print_table, print_value
from plimsoll_cli.targets import parse_target

if TYPE_CHECKING:
    from plimsoll_cli.cluster.client import Cluster

STATE_DIR_NAME = "state"
MIN_TERMINAL_WIDTHS = {"OPENED": 90, "TARGET": 110, "OUTCOME": 75, "RETURNED": 110}
"""Minimum terminal width that shows each column."""
POLL_INTERVAL_S = 2.0
MAX_LABEL_CHARS = 63
INCIDENTS_PER_PROGRESS_REPORT = 500
Listing = tuple[list[IncidentView], str | None]
"""Incidents, and a message about those that cannot be read."""


@dataclass(frozen=True)
class IncidentFilter:
    """Filter for incidents; a field that is None matches all of them.

    ``target`` is a name as in :func:`matches_target`.
    """

    target: str | None = None
    phase: str | None = None
    kind: str | None = None
    open_only: bool = False

    def validate(self) -> None:
        """Raise UsageError for an unknown phase or kind."""
        allowed = (
            ("--phase", self.phase, list(IncidentPhase)),
            ("--kind", self.kind, list(IncidentKind)),
        )
        for flag, word, known in allowed:
            if word is not None and word not in known:
                raise UsageError(f"{flag} {word!r}: use one of {', '.join(known)}")

    def matches(self, incident: IncidentView) -> bool:
        """Report whether ``incident`` passes the filter."""
        return (
            (self.target is None or matches_target(incident, self.target))
            and self.phase in (None, incident.story.phase)
            and self.kind in (None, incident.spec.kind)
            and not (self.open_only and incident.story.has_ended)
        )


def read_journal(journal: Path) -> list[IncidentRecord]:
    """Return the incidents in a supervisor's journal, newest first. Raises UsageError."""
    if not journal.is_file():
        raise UsageError(
            f"{journal}: the journal does not exist: check that the service ran on this machine"
        )
    try:
        db = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
        try:
            rows = db.execute("SELECT body FROM incidents ORDER BY opened_at DESC").fetchall()
        finally:
            db.close()
        return [decode(body, IncidentRecord) for (body,) in rows]
    except (sqlite3.Error, MalformedError) as error:
        raise UsageError(f"{journal}: the journal cannot be read: {error}") from None


def read_local_incidents(service: str | None, run_dir: Path | None) -> Listing:
    """Return the incidents of services on this machine, or of one service.

    The message reports journals of other services that cannot be read. Raises UsageError for the
    only journal.
    """
    folder = run_dir or (folders.get_service_dir(service) if service is not None else None)
    if folder is not None:
        incidents = read_journal(folder / STATE_DIR_NAME / JOURNAL_FILE)
        return [make_view_from_journal(one) for one in incidents], None
    found: list[IncidentView] = []
    unreadable: list[str] = []
    for journal in sorted(folders.get_base_dir().glob(f"*/{STATE_DIR_NAME}/{JOURNAL_FILE}")):
        try:
            found += [make_view_from_journal(one) for one in read_journal(journal)]
        except UsageError as error:
            unreadable.append(str(error))
    return found, _summarize_unreadable(unreadable)


def list_incidents(
    cluster: Cluster, target: str | None, show_progress: Callable[[str], None]
) -> Listing:
    """Return the incidents that may belong to ``target``; all incidents if it is None.

    Label selectors only narrow the list: it may include those of other targets. The message reports
    incidents that cannot be read. Raises RunError.
    """
    found: dict[tuple[str, str], IncidentView] = {}
    unreadable: dict[str, None] = {}
    for query in make_label_queries(target):
        for item in cluster.list_custom_objects(INCIDENT_PLURAL, **query):
            try:
                one = make_view_from_object(item)
            except UnreadableError as error:
                unreadable[str(error)] = None
                continue
            found[one.namespace, one.name] = one
            if len(found) % INCIDENTS_PER_PROGRESS_REPORT == 0:
                show_progress(f"reading incidents: {len(found)}")
    return list(found.values()), _summarize_unreadable(
        list(unreadable), ": the incident may have been written by another version of Plimsoll"
    )


def _summarize_unreadable(errors: list[str], hint: str = "") -> str | None:
    if not errors:
        return None
    others = f" (and {len(errors) - 1} more)" if errors[1:] else ""
    return f"not shown: {errors[0]}{others}{hint}"


def make_label_queries(target: str | None) -> list[dict[str, str]]:
    """Return the query parameters of the list requests that find all incidents of ``target``."""
    if target is None or ((parsed := parse_target(target)).is_pod and "/" in target):
        return [{}]
    # A name without a kind may be that of a service, a workload or a policy.
    keys = [POLICY_LABEL] if parsed.kind == POLICY_KIND else [SERVICE_LABEL]
    keys += [POLICY_LABEL] if parsed.is_pod else []
    value = parsed.name[:MAX_LABEL_CHARS].rstrip("-.")
    return [{"labelSelector": f"{key}={value}"} for key in keys]


def get_incident(cluster: Cluster, name: str) -> IncidentView:
    """Return the incident with this object name, or with this ID in a supervisor's log.

    Raises UsageError if it does not exist, and RunError.
    """
    item = cluster.get_custom_object(INCIDENT_PLURAL, name) or next(
        (
            one
            for one in cluster.list_custom_objects(INCIDENT_PLURAL)
            if (one.get("spec") or {}).get("id") == name
        ),
        None,
    )
    if item is None:
        space = cluster.namespace or "default"
        raise UsageError(
            f"incident {name} does not exist in namespace {space}: to list incidents, run:"
            " plimsoll incidents -A"
        )
    try:
        return make_view_from_object(item)
    except UnreadableError as error:
        raise RunError(str(error)) from None


def select_newest_incidents(
    incidents: Iterable[IncidentView], incident_filter: IncidentFilter, limit: int | None
) -> list[IncidentView]:
    """Return the newest ``limit`` incidents that pass the filter; None means all."""
    chosen = [incident for incident in incidents if incident_filter.matches(incident)]
    chosen.sort(key=lambda incident: incident.spec.opened_at, reverse=True)
    return chosen[:limit]


def print_incidents(
    incidents: Sequence[IncidentView],
    output: Output,
    omitted_count: int = 0,
    namespace: str | None = None,
) -> None:
    """Print the incidents, and the number of older ones that are omitted.

    ``namespace`` is the only namespace of a cluster that was searched.
    """
    if not output.is_table:
        print_value([make_incident_object(incident) for incident in incidents], output)
        return
    out = make_console()
    if not incidents:
        where = f" in namespace {namespace}; to search all namespaces, add -A" if namespace else ""
        out.print(f"no incidents{where}", soft_wrap=True, markup=False)
        return
    wide = output is Output.WIDE
    spaces = wide or len({incident.namespace for incident in incidents}) > 1
    names, rows = (
        choose_columns(wide, spaces),
        [make_row(incident, wide, spaces) for incident in incidents],
    )
    if out.is_terminal and not wide:
        names, rows = fit_columns(names, rows, out.width, MIN_TERMINAL_WIDTHS)
    print_table(names, rows, out)
    if omitted_count:
        out.print(f"{omitted_count} older incidents are not shown: increase --limit to show them")


def watch_incidents(
    read_incidents: Callable[[], Listing],
    incident_filter: IncidentFilter,
    output: Output,
) -> None:
    """Print each change of incidents until Ctrl-C; read them every two seconds."""
    with contextlib.suppress(KeyboardInterrupt):
        _print_incident_changes(read_incidents, incident_filter, output)


def _print_incident_changes(
    read_incidents: Callable[[], Listing],
    incident_filter: IncidentFilter,
    output: Output,
) -> None:
    known: dict[tuple[str, str], str] = {}
    out, errors = make_console(), make_console(stderr=True)
    last_problem = None
    while True:
        try:
            incidents, problem = read_incidents()
        except RunError as error:
            incidents, problem = [], str(error)
        if problem != last_problem and problem is not None:
            text = f"{time.strftime('%H:%M:%S')}  {problem}"
            errors.print(text, style="red", soft_wrap=True, markup=False)
        last_problem = problem
        fresh = select_newest_incidents(incidents, incident_filter, None)
        spaces = len({incident.namespace for incident in fresh}) > 1
        for incident in reversed(fresh):
            state = f"{incident.story.phase} {incident.status.outcome or ''}"
            if known.get((incident.namespace, incident.name)) != state:
                known[incident.namespace, incident.name] = state
                if output.is_table:
                    now = time.strftime("%H:%M:%S")
                    name = f"{incident.namespace}/{incident.name}" if spaces else incident.name
                    out.print(
                        f"{now}  {name}  {state}  {incident.story.headline}",
                        soft_wrap=True,
                        markup=False,
                    )
                else:
                    print_value(make_incident_object(incident), output)
        time.sleep(POLL_INTERVAL_S)


def choose_columns(wide: bool, with_namespace: bool) -> list[str]:
    """Return the column names of the table."""
    names = ["NAMESPACE"] if with_namespace else []
    names += ["OPENED", "NAME", "TARGET", "PHASE", "OUTCOME", "RETURNED", "WHAT"]
    return [*names, "POD", "EPOCH", "ENDED"] if wide else names


def make_row(incident: IncidentView, wide: bool, with_namespace: bool) -> list[Cell]:
    """Return the cells of an incident, in the order of :func:`choose_columns`."""
    spec, status, story = incident.spec, incident.status, incident.story
    returned = "" if status.returned_bytes is None else format_bytes(status.returned_bytes)
    phase = Text(story.phase, style=STYLE_BY_STATE.get(story.phase, OPEN_STATE_STYLE))
    cells: list[Cell] = [incident.namespace] if with_namespace else []
    cells += [spec.opened_at, incident.name, format_target(incident), phase, status.outcome or ""]
    cells += [returned, story.headline]
    return [*cells, spec.pod, spec.epoch, status.ended_at or ""] if wide else cells


def make_incident_object(incident: IncidentView) -> dict[str, Any]:
    """Return the incident as a LeakIncident object."""
    space = {"namespace": incident.namespace} if incident.namespace else {}
    return {
        "metadata": {"name": incident.name, **space},
        "spec": msgspec.to_builtins(incident.spec),
        "status": msgspec.to_builtins(incident.status),
    }
