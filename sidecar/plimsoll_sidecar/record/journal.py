"""The supervisor's memory on disk: SQLite, written before anything is begun.

One transaction holds the governor's whole state (with the command that is about to be sent) and
every incident that changed. ``synchronous=FULL`` in WAL mode: what was committed survives a crash
of the node as well.

What is damaged is set aside and never stops the rest: a row alone, or the whole file, which the
next write then replaces. A volume that cannot be written is another matter: that is an error.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_sidecar.clock import Reading
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record import storage
from plimsoll_sidecar.record.storage import (
    RESTARTS_FILE,
    SET_ASIDE,
    Damaged,
    LastKnownEngine,
    RestartCopy,
    SetAside,
)

log = logging.getLogger(__name__)

KEPT_INCIDENTS = 200
KEPT_UNPUBLISHED = 1000
"""Ended incidents kept while the API server takes none; beyond, the oldest are lost."""
OFFERED = 64
"""Incidents read at once for the API server, the newest first."""
BUSY_S = 5.0
CACHE_KIB = 64
"""Of the file in memory; by default SQLite keeps up to 2 MiB of it, page by page."""
ROW, WHOLE = "row", "file"
"""Parts of a journal that may be damaged."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS incidents (
    name TEXT PRIMARY KEY, opened_at REAL NOT NULL, ended INTEGER NOT NULL,
    revision INTEGER NOT NULL, published INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
"""
_FORGET = (
    "DELETE FROM incidents WHERE ended AND (published = revision OR NOT ?)"
    " AND name NOT IN (SELECT name FROM incidents ORDER BY opened_at DESC LIMIT ?)"
)
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The message of an error quotes the damaged file, and need not be text then."""
_READABLE = (
    "SELECT key, body, checksum FROM state LIMIT 0",
    "SELECT name, opened_at, ended, revision, published, body, checksum FROM incidents LIMIT 0",
)
_VOLUME = frozenset(
    (
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT,
    )
)  # fmt: skip
"""Errors of the volume or of another user of the file: all others say that the file is damaged."""


class JournalError(Exception):
    """The journal cannot be read or written; the message names the file and what to do."""


def _ignore(part: str) -> None:
    return


class Journal:
    """Used by one thread. Each write is one transaction, on disk when the call returns."""

    def __init__(
        self, path: Path, publishes: bool = False, damaged: Callable[[str], None] = _ignore
    ) -> None:
        """Open the journal, creating it; raise :class:`JournalError`.

        With ``publishes``, an incident is forgotten only after it reached Kubernetes. ``damaged``
        is called with ``row`` or ``file`` for each that is lost.
        """
        self.path, self._publishes, self._damaged = path, publishes, damaged
        self._aside = SetAside(path.with_name(SET_ASIDE))
        self._restarts = RestartCopy(path.with_name(RESTARTS_FILE))
        self._unreadable: set[bytes] = set()
        self.clock: Reading | None = None
        """What was written with the state that was loaded."""
        self._broken: Exception | None = None
        if self._restarts.exists and _size(path) == 0:
            self._lost("the file was empty or missing")
        try:
            self._db = _connect(path)
        except SQLITE_ERRORS as error:
            if not _is_damage(error):
                raise self._error(error) from error
            self._db = self._replacement(error)
        self._inode = _inode(path)

    def close(self) -> None:
        """Close the file; everything that was written is on disk already."""
        self._db.close()

    @property
    def kept(self) -> list[str]:
        """Names of the damaged parts that are kept in ``set-aside``, oldest first."""
        return self._aside.names()

    def load(self) -> tuple[GovernorState, LastKnownEngine]:
        """Return what the last write left; empty where there was none."""
        try:
            found = self._db.execute("SELECT key, body, checksum FROM state").fetchall()
        except SQLITE_ERRORS as error:
            raise self._read_error(error) from error
        state, engine = GovernorState(), LastKnownEngine()
        for key, body, checksum in found:
            try:
                if key == b"governor":
                    state = storage.decode(body, checksum, GovernorState)
                elif key == b"engine":
                    engine = storage.decode(body, checksum, LastKnownEngine)
                elif key == b"clock":
                    self.clock = storage.decode(body, checksum, Reading)
            except Damaged as error:
                self._set_row_aside("state", "key", key, body, error)
        lacking = self._restarts.join(state)
        if lacking:
            log.warning("%d restarts are known only from %s", lacking, RESTARTS_FILE)
        return state, engine

    def write(
        self,
        state: GovernorState,
        incidents: Iterable[Incident] = (),
        engine: LastKnownEngine | None = None,
        clock: Reading | None = None,
    ) -> None:
        """Write the state and the incidents that changed, all or nothing.

        ``clock`` is the one that the times in them are of.
        """
        changed = {incident.name: incident for incident in incidents}
        try:
            self._restarts.write(state)
        except OSError as error:
            raise self._error(error) from error
        if self._broken is None and _inode(self.path) != self._inode:
            self._lost("the file was emptied or replaced while in use")
            self._broken = sqlite3.DatabaseError("the file was replaced")
        if self._broken is None:
            try:
                self._transact(state, changed.values(), engine, clock)
                return
            except SQLITE_ERRORS as error:
                if error_code(error) == sqlite3.SQLITE_READONLY:
                    self._reconnect()
                if not _is_damage(error):
                    raise self._error(error) from error
                self._broken = error
        self._db.close()
        self._db = self._replacement(self._broken)
        self._inode, self._broken = _inode(self.path), None
        every = {incident.name: incident for incident in state.incidents} | changed
        try:
            self._transact(state, every.values(), engine, clock)
        except SQLITE_ERRORS as error:
            raise self._error(error) from error

    def unpublished(self) -> list[tuple[int, Incident]]:
        """Return the newest incidents whose last revision is not known to be in Kubernetes.

        Open ones come first, and at most :data:`OFFERED`: the others follow once these are there.
        """
        found = self._select(
            "published < revision ORDER BY ended, opened_at DESC LIMIT ?", (OFFERED,)
        )
        return found[::-1]

    def recent(self, limit: int) -> list[Incident]:
        """Return the newest incidents, newest first."""
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
        except SQLITE_ERRORS as error:
            raise self._read_error(error) from error

    def _transact(
        self,
        state: GovernorState,
        incidents: Iterable[Incident],
        engine: LastKnownEngine | None,
        clock: Reading | None,
    ) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._put("governor", state)
            if engine is not None:
                self._put("engine", engine)
            if clock is not None:
                self._put("clock", clock)
            for incident in incidents:
                self._db.execute(
                    "INSERT INTO incidents"
                    " (name, opened_at, ended, revision, published, body, checksum)"
                    " VALUES (?, ?, ?, 1, 0, ?, ?) ON CONFLICT (name) DO"
                    " UPDATE SET ended = excluded.ended, body = excluded.body,"
                    " checksum = excluded.checksum, revision = revision + 1",
                    (incident.name, incident.opened_at, incident.ended, *storage.encode(incident)),
                )
            self._db.execute(_FORGET, (self._publishes, KEPT_INCIDENTS))
            self._db.execute(_FORGET, (False, KEPT_UNPUBLISHED))

    def _put(self, key: str, value: GovernorState | LastKnownEngine | Reading) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO state (key, body, checksum) VALUES (?, ?, ?)",
            (key, *storage.encode(value)),
        )

    def _select(self, where: str, values: tuple[int, ...]) -> list[tuple[int, Incident]]:
        try:
            found = self._db.execute(
                f"SELECT name, revision, body, checksum FROM incidents WHERE {where}",  # noqa: S608 - our own text
                values,
            ).fetchall()
        except SQLITE_ERRORS as error:
            raise self._read_error(error) from error
        read = []
        for name, revision, body, checksum in found:
            try:
                incident = storage.decode(body, checksum, Incident)
                if incident.name.encode() != name or not isinstance(revision, int):
                    raise Damaged("its name or revision is not the incident's")
            except Damaged as error:
                self._set_row_aside("incidents", "name", name, body, error)
            else:
                read.append((revision, incident))
        return read

    # ---- damage

    def _set_row_aside(
        self, table: str, column: str, key: object, body: object, why: Damaged
    ) -> None:
        """Keep the row as a file and go on without it; left where it is on a full volume."""
        name = key if isinstance(key, bytes) else repr(key).encode()
        if name in self._unreadable:
            return
        self._damaged(ROW)
        what = f"{table}-{name.decode(errors='replace')}"
        data = body if isinstance(body, bytes) else repr(body).encode()
        try:
            kept = self._aside.put(f"{what}.json", data)
            with self._db:
                self._db.execute(
                    f"DELETE FROM {table} WHERE CAST({column} AS BLOB)"  # noqa: S608 - our own text
                    " = CAST(? AS BLOB)",
                    (key,),
                )
        except (OSError, *SQLITE_ERRORS) as error:
            self._unreadable.add(name)
            log.error("journal %s: row %s cannot be read (%s): skipped", self.path, what, why)
            log.info("it cannot be moved to set-aside: %s", error)
        else:
            log.error(
                "journal %s: row %s cannot be read (%s): kept as %s", self.path, what, why, kept
            )

    def _replacement(self, why: Exception) -> sqlite3.Connection:
        """Return a new file in the place of a damaged one. Raises :class:`JournalError`."""
        try:
            if _size(self.path):
                kept = self._aside.move(self.path, ("-wal",))
                log.error("journal %s is damaged (%s): kept as %s", self.path, why, kept)
                self._damaged(WHOLE)
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            return _connect(self.path)
        except (OSError, *SQLITE_ERRORS) as error:
            raise self._error(error) from error

    def _lost(self, why: str) -> None:
        """Say that the file is lost, and keep a note of it in ``set-aside``."""
        log.error("journal %s is lost: %s; past incidents are no longer listed", self.path, why)
        self._damaged(WHOLE)
        with contextlib.suppress(OSError):
            self._aside.put("journal-lost.txt", f"{self.path}: {why}\n".encode())

    def _reconnect(self) -> None:
        """Open the file again.

        One that was opened on a read-only volume stays read-only, whatever becomes of it.
        """
        with contextlib.suppress(*SQLITE_ERRORS):
            again = _connect(self.path)
            self._db.close()
            self._db, self._inode = again, _inode(self.path)

    def _read_error(self, error: Exception) -> JournalError:
        """Return the error of a failed read; the next write replaces a damaged file."""
        if not _is_damage(error):
            return self._error(error)
        self._broken = error
        return JournalError(f"journal {self.path} is damaged ({error}): replaced by the next write")

    def _error(self, error: Exception) -> JournalError:
        return JournalError(
            f"journal {self.path}: {error}; free space on its volume or make it writable:"
            " until then the supervisor takes no action"
        )


def error_code(error: Exception) -> int | None:
    """SQLite's primary result code; None for what the Python module itself found wrong."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _is_damage(error: Exception) -> bool:
    return error_code(error) not in _VOLUME


def _inode(path: Path) -> int | None:
    """None where there is no such file, or an empty one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino if found.st_size else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.text_factory = bytes  # what is stored as text need not be text any more
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != b"ok":
            raise sqlite3.DatabaseError(verdict.decode(errors="replace"))
        db.executescript(_SCHEMA)
        for table in ("state", "incidents"):
            columns = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
            if b"checksum" not in columns:
                db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")
        for readable in _READABLE:
            db.execute(readable)
    except SQLITE_ERRORS:
        db.close()
        raise
    return db
