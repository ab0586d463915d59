"""Recordings that a person replays, and the supervisor's journal."""

from __future__ import annotations

import gzip
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from plimsoll_api.incident_object import make_object, make_status_object
from plimsoll_api.supervision import Mode
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.trace import TraceError
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record.journal import Journal, JournalError
from plimsoll_sidecar.replay import replay
from tests.fuzz.watched import Bounds, Target

LARGE = 1 << 20
GZIP = b"\x1f\x8b"
SERVICE = ServiceRef(name="s", namespace="n", uid="u")
HEADER = (
    b'{"trace":1,"name":"t","engine":{"type":"plimsoll"},"started_at":"2026-01-01T00:00:00Z",'
    b'"interval_s":1,"budget":{"host":{"growth":1048576,"window_s":3600}}}\n'
)
FIELDS = (
    "trace", "name", "engine", "type", "started_at", "interval_s", "limits", "budget", "growth",
    "window_s", "warmup_s", "t", "epoch", "host", "rss_anon", "cgroup_anon", "oom_kills",
    "processes", "malloc", "in_use", "python_objects", "device", "index", "used", "total", "torch",
    "allocated", "reserved", "load", "running", "waiting", "steps_total", "requests_total",
    "ledger", "owner", "kind", "bytes", "bound", "scrape_ok", "serving", "ready",
)  # fmt: skip
NUMBERS = ("1e308", "-1e308", "1e999", "-1", "9223372036854775808", "null", "true", "[]", "{}")
JUDGED = Bounds(cpu_s=6.0)
"""A replay judges each sample, which takes 0.3 ms of a CPU of its own: 1 MB holds 11,000."""


def make(name: str, folder: Path) -> Target:
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    words = (*NUMBERS, *(f'"{field}":' for field in FIELDS))
    match name:
        case "trace":
            return Target(_trace(folder), words, _large_traces, JUDGED)
        case "journal":
            return Target(
                _journal(folder), ("SQLite format 3", "CREATE TABLE"), lambda: [b"\0" * LARGE]
            )
        case _:
            states = ("incidents", "restarts", "pending", "phase", "opened_at", "timeline", "slot")
            rows = tuple(f'"{field}":' for field in states)
            return Target(
                _rows(folder), (*words, *rows), lambda: (b"[" * LARGE, b'{"a":' * (LARGE // 5))
            )


def _trace(folder: Path) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        path = folder / ("t.jsonl.gz" if data.startswith(GZIP) else "t.jsonl")
        path.write_bytes(data)
        try:
            for _ in replay(path, Mode.RECOVER):
                pass
        except TraceError:
            pass

    return run


def _large_traces() -> Iterator[bytes]:
    sample = b'{"t":%d,"epoch":1,"host":{"rss_anon":%d},"load":{"running":1,"steps_total":%d}}\n'
    yield HEADER + b"".join(sample % (t, t << 20, t) for t in range(2000))
    yield b"[" * LARGE
    yield b'{"unknown":' + b"[" * LARGE
    yield HEADER + b'{"unknown":' + b"[" * LARGE
    yield HEADER + b'{"t":1,"epoch":1,"device":[' + b'{"index":1},' * (LARGE // 13)
    yield HEADER + b"\n" * LARGE
    yield gzip.compress(HEADER) + _bomb(600)


def _bomb(mib: int) -> bytes:
    """So many MiB in one line, compressed; a thousandth of them."""
    packer = zlib.compressobj(wbits=31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(mib)) + packer.flush()


def _journal(folder: Path) -> Callable[[bytes], None]:
    """The input is the file."""

    def run(data: bytes) -> None:
        path = _clean(folder)
        path.write_bytes(data)
        _use(path)

    return run


def _rows(folder: Path) -> Callable[[bytes], None]:
    """The input is the bodies of three rows, apart by a NUL: state, engine, incident. Rows of an
    older version have no checksum, so their bodies are decoded whatever they hold."""
    seed = folder / "seed.sqlite"
    seed.unlink(missing_ok=True)
    Journal(seed).close()
    empty = seed.read_bytes()

    def run(data: bytes) -> None:
        path = _clean(folder)
        path.write_bytes(empty)
        governor, engine, incident = (*data.split(b"\0", 2), b"", b"", b"")[:3]
        db = sqlite3.connect(path)
        with db:
            db.execute("PRAGMA synchronous = OFF")
            for key, body in (("governor", governor), ("engine", engine)):
                if body:
                    db.execute("INSERT INTO state (key, body) VALUES (?, ?)", (key, body))
            if incident:
                db.execute(
                    "INSERT INTO incidents (name, opened_at, ended, revision, published, body)"
                    " VALUES ('i', 1.0, 0, 1, 0, ?)",
                    (incident,),
                )
        db.close()
        _use(path)

    return run


def _use(path: Path) -> None:
    """Everything that a supervisor does with its journal."""
    try:
        journal = Journal(path, is_publishing=True)
    except JournalError:
        return
    try:
        journal.load()
        for incident in journal.read_recent(20):
            make_object(incident, "pod-0-1", SERVICE, "pod-0", "engine")
            make_status_object(incident, "pod-0-1", SERVICE, 1)
        for revision, incident in journal.read_unpublished():
            journal.mark_published(incident.name, revision)
        journal.write(GovernorState())
    except JournalError:
        pass
    finally:
        journal.close()


def _clean(folder: Path) -> Path:
    """The path of the journal, and nothing left of the one before."""
    path = folder / "journal.sqlite"
    for old in folder.glob("journal.sqlite*"):
        old.unlink()
    return path
