"""``plimsoll incidents``: what the local journals hold."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from plimsoll_api.units import format_bytes
from plimsoll_cli.errors import UsageError
from plimsoll_cli.local import root
from plimsoll_cli.timeline import clock, headline
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.incident import rfc3339
from plimsoll_sidecar.record.journal import FILE

STATE_DIR = "state"


def read(journal: Path) -> list[Incident]:
    """The incidents of one journal, newest first, without touching it. Raises UsageError."""
    if not journal.is_file():
        raise UsageError(f"{journal}: there is no journal: has the service run here?")
    try:
        db = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
        try:
            rows = db.execute("SELECT body FROM incidents ORDER BY opened_at DESC").fetchall()
        finally:
            db.close()
        return [msgspec.json.decode(body, type=Incident) for (body,) in rows]
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise UsageError(f"{journal}: cannot be read: {error}") from None


def show(service: str | None, run_dir: Path | None, output: str) -> None:
    """Prints the incidents of one run directory, one service or all services that ran here."""
    if run_dir is not None:
        journals = [run_dir / STATE_DIR / FILE]
    elif service is not None:
        journals = [root.of(service) / STATE_DIR / FILE]
    else:
        journals = sorted(root.base().glob(f"*/{STATE_DIR}/{FILE}"))
    found = [incident for journal in journals for incident in read(journal)]
    found.sort(key=lambda incident: incident.opened_at, reverse=True)
    console = Console(soft_wrap=True)
    if output == "json":
        console.file.write(
            msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
        )
    elif not found:
        console.print("no incidents")
    else:
        console.print(_table(found))


def _table(found: list[Incident]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in ("OPENED", "NAME", "PHASE", "OUTCOME", "RETURNED", "WHAT"):
        table.add_column(column, no_wrap=True)
    for incident in found:
        returned = incident.returned_bytes
        table.add_row(
            f"{rfc3339(incident.opened_at)[:10]} {clock(incident.opened_at)}",
            incident.name,
            incident.phase.value,
            incident.reason.value if incident.reason else "",
            "" if returned is None else format_bytes(returned),
            headline(incident),
        )
    return table
