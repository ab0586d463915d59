"""The supervisor's memory on disk: SQLite, written before anything is begun.

One transaction holds the governor's whole state (with the command that is about to be sent) and
every incident that changed. ``synchronous=FULL`` in WAL mode: what was committed survives a crash
of the node as well. A file that is damaged is moved aside, never deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from plimsoll_sidecar.detect.remembered import Remembered
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState

log = logging.getLogger(__name__)

FILE = "journal.sqlite"
KEPT_INCIDENTS = 200
BUSY_S = 5.0
CACHE_KIB = 64
"""Of the file in memory; by default SQLite keeps up to 2 MiB of it, page by page."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS incidents (
    name TEXT PRIMARY KEY, opened_at REAL NOT NULL, ended INTEGER NOT NULL,
    revision INTEGER NOT NULL, published INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
"""


class JournalError(Exception):
    """The journal cannot be read or written; the message names the file and what to do."""


class Engine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was last known of the engine, for our own restart: it may not answer then."""

    capabilities: frozenset[str] = frozenset()
    frontend_pid: int | None = None
    frontend_started: int | None = None
    epoch: str | None = None
    """The epoch that ``remembered`` is about."""
    remembered: Remembered = Remembered()


class Journal:
    """Used by one thread. Each write is one transaction, on disk when the call returns."""

    def __init__(self, path: Path, publishes: bool = False) -> None:
        """Opens the journal, creating it; raises :class:`JournalError`.

        With ``publishes``, an incident is forgotten only after it reached Kubernetes.
        """
        self.path, self._publishes = path, publishes
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return _connect(self.path)
        except sqlite3.OperationalError as error:
            raise self._error(error) from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            aside = self.path.with_name(f"{self.path.name}.corrupt-{int(time.time())}")
            log.error("journal %s is damaged (%s): moved to %s", self.path, error, aside.name)
            try:
                os.replace(self.path, aside)
                for suffix in ("-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        Path(f"{self.path}{suffix}").unlink()
                return _connect(self.path)
            except (OSError, sqlite3.Error) as again:
                raise self._error(again) from again

    def close(self) -> None:
        self._db.close()

    def load(self) -> tuple[GovernorState, Engine]:
        """What the last write left; empty where there was none."""
        try:
            return _load(self._db)
        except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._error(error) from error

    def write(
        self, state: GovernorState, incidents: Iterable[Incident] = (), engine: Engine | None = None
    ) -> None:
        """Writes the state and the incidents that changed, all or nothing."""
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._put("governor", state)
                if engine is not None:
                    self._put("engine", engine)
                for incident in incidents:
                    self._db.execute(
                        "INSERT INTO incidents VALUES (?, ?, ?, 1, 0, ?) ON CONFLICT (name) DO"
                        " UPDATE SET ended = excluded.ended, body = excluded.body,"
                        " revision = revision + 1",
                        (
                            incident.name,
                            incident.opened_at,
                            incident.ended,
                            msgspec.json.encode(incident),
                        ),
                    )
                self._db.execute(
                    "DELETE FROM incidents WHERE ended AND (published = revision OR NOT ?)"
                    " AND name NOT IN"
                    " (SELECT name FROM incidents ORDER BY opened_at DESC LIMIT ?)",
                    (self._publishes, KEPT_INCIDENTS),
                )
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY:
                self._reconnect()
            raise self._error(error) from error

    def _reconnect(self) -> None:
        """A file that was opened on a read-only volume stays read-only, whatever becomes of it."""
        with contextlib.suppress(sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError):
            again = _connect(self.path)
            self._db.close()
            self._db = again

    def unpublished(self) -> list[tuple[int, Incident]]:
        """Incidents whose newest revision is not known to be in Kubernetes, oldest first."""
        return self._select("published < revision ORDER BY opened_at", ())

    def recent(self, limit: int) -> list[Incident]:
        """The newest incidents, newest first."""
        found = self._select("1 ORDER BY opened_at DESC LIMIT ?", (limit,))
        return [incident for _, incident in found]

    def published(self, name: str, revision: int) -> None:
        """Remembers that this revision reached Kubernetes."""
        try:
            with self._db:
                self._db.execute(
                    "UPDATE incidents SET published = MAX(published, ?) WHERE name = ?",
                    (revision, name),
                )
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _put(self, key: str, value: msgspec.Struct) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO state VALUES (?, ?)", (key, msgspec.json.encode(value))
        )

    def _select(self, where: str, values: tuple[int, ...]) -> list[tuple[int, Incident]]:
        try:
            rows = self._db.execute(
                f"SELECT revision, body FROM incidents WHERE {where}",  # noqa: S608 - our own text
                values,
            ).fetchall()
            return [(rev, msgspec.json.decode(body, type=Incident)) for rev, body in rows]
        except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> JournalError:
        return JournalError(
            f"journal {self.path}: {error}; make room on its volume or make it writable:"
            " until then nothing is done to the engine"
        )


def _load(db: sqlite3.Connection) -> tuple[GovernorState, Engine]:
    rows = dict(db.execute("SELECT key, body FROM state"))
    state = msgspec.json.decode(rows.get("governor", b"{}"), type=GovernorState)
    return state, msgspec.json.decode(rows.get("engine", b"{}"), type=Engine)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        db.executescript(_SCHEMA)
        _load(db)
    except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError):
        db.close()
        raise
    return db
