"""The list of incidents: what cannot be read does not hide the rest, and what a watch prints.

Tests ``plimsoll_cli/incidents.py``.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from plimsoll_cli import incidents
from plimsoll_cli.cluster.client import Cluster, format_denied_message
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.incident_view import make_view_from_object
from plimsoll_cli.local import run_dir as folders
from plimsoll_cli.main import app
from plimsoll_cli.output import Output


def item(name: str, namespace: str = "ml", **spec: Any) -> dict[str, Any]:
    fixed = {
        "id": name, "workloadRef": {"kind": "InferenceService", "name": "s"}, "pod": "s-0",
        "container": "engine", "epoch": "ab:1", "openedAt": "2026-01-01T00:00:00Z", "kind": "Stall",
    }  # fmt: skip
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": fixed | spec,
        "status": {"phase": "Resolved", "outcome": "Trim"},
    }


class Listed:
    """A cluster with these incidents."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self._items = items

    def list_custom_objects(self, plural: str, **query: Any) -> list[dict[str, Any]]:
        return list(self._items)


def test_an_incident_of_another_version_does_not_hide_the_others() -> None:
    items = item("a"), item("old-1", id=1), item("b"), item("old-2", pod=None)
    cluster = cast("Cluster", Listed(*items))
    found, problem = incidents.list_incidents(cluster, None, lambda text: None)
    assert [one.name for one in found] == ["a", "b"]
    assert problem is not None
    assert problem.startswith("not shown: LeakIncident old-1: ")
    assert "(and 1 more): the incident may have been written by another version" in problem


def test_a_damaged_journal_does_not_hide_the_other_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "get_base_dir", lambda: tmp_path)
    for service in ("broken", "chat"):
        (tmp_path / service / "state").mkdir(parents=True)
    damaged = tmp_path / "broken/state/journal.sqlite"
    damaged.write_bytes(b"no database" * 100)
    with contextlib.closing(sqlite3.connect(tmp_path / "chat/state/journal.sqlite")) as db:
        db.execute("CREATE TABLE incidents (opened_at REAL, body BLOB)")
        body = b'{"name": "chat-1", "kind": "Stall", "epoch": "a:1", "opened_at": 1.0}'
        db.execute("INSERT INTO incidents VALUES (1.0, ?)", (body,))
        db.commit()
    found, problem = incidents.read_local_incidents(None, None)
    assert [one.name for one in found] == ["chat-1"]
    assert problem == f"not shown: {damaged}: the journal cannot be read: file is not a database"
    done = CliRunner().invoke(app, ["incidents", "--local", "--kind=Recycle"])
    assert done.stdout == "", "what is unknown is not none"
    assert str(done.exception) == problem
    with pytest.raises(UsageError, match="the journal cannot be read"):
        incidents.read_local_incidents(None, tmp_path / "broken")


def watch(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *polls: incidents.Listing | RunError,
    output: Output = Output.TABLE,
) -> tuple[list[str], list[str]]:
    """Return the lines on standard output and standard error, without the times."""
    monkeypatch.setattr(incidents, "POLL_INTERVAL_S", 0.0)
    left = list(polls)

    def read() -> incidents.Listing:
        if not left:
            raise KeyboardInterrupt
        poll = left.pop(0)
        if isinstance(poll, RunError):
            raise poll
        return poll

    incidents.watch_incidents(read, incidents.IncidentFilter(), output)
    printed = capsys.readouterr()
    return [line[10:] for line in printed.out.splitlines()], printed.err.splitlines()


def test_two_namespaces_may_have_incidents_of_one_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [make_view_from_object(item("s-0-1", namespace)) for namespace in ("east", "west")]
    both[1].status.outcome = "Cleared"
    shown, _ = watch(monkeypatch, capsys, (both, None), (both, None), (both, None))
    assert shown == ["west/s-0-1  Resolved Cleared  Stall", "east/s-0-1  Resolved Trim  Stall"]


@pytest.mark.parametrize("output", [Output.TABLE, Output.JSON])
def test_a_watch_tells_once_and_whole_what_it_may_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: Output
) -> None:
    """On standard error, so that a program still reads JSON."""
    path = "/apis/plimsoll.dev/v1alpha1/namespaces/ml/leakincidents"
    denied = RunError(format_denied_message("GET", path))
    shown, told = watch(monkeypatch, capsys, denied, denied, ([], None), output=output)
    assert shown == []
    assert told[2:] == [
        "rules:",
        "- apiGroups: [plimsoll.dev]",
        "  resources: [leakincidents]",
        "  verbs: [list]",
    ]
