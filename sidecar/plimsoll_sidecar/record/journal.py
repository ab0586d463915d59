"""Store the supervisor's state on disk in SQLite, before any action starts.

Each transaction contains the whole state of the governor and all changed incidents, and survives a
crash of the node. A damaged row or file is moved to ``set-aside``, and the next write replaces it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_sidecar.clock import ClockReading
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.record import storage
from plimsoll_sidecar.record.storage import (
    RESTARTS_FILE,
    SET_ASIDE_FOLDER,
    DamagedParts,
    DamagedRowError,
    LastKnownEngine,
    RestartCopy,
)

log = logging.getLogger(__name__)

MAX_INCIDENTS = 200
# The journal keeps more incidents while they cannot be published.
MAX_UNPUBLISHED_INCIDENTS = 1000
# The newest incidents are read first, for publishing.
MAX_INCIDENTS_PER_READ = 64
# Another process may lock the file.
BUSY_TIMEOUT_S = 5.0
# SQLite's default is 2 MiB.
PAGE_CACHE_KIB = 64
# Values of a metric's label.
DAMAGED_ROW, DAMAGED_FILE = "row", "file"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (
    key TEXT PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS incidents (
    name TEXT PRIMARY KEY, opened_at REAL NOT NULL, ended INTEGER NOT NULL,
    revision INTEGER NOT NULL, published INTEGER NOT NULL, body BLOB NOT NULL, checksum INTEGER
) WITHOUT ROWID;
"""
# Parameters: whether to keep unpublished incidents, and the number of newest incidents to keep.
_DELETE_OLD_INCIDENTS = (
    "DELETE FROM incidents WHERE ended AND (published = revision OR NOT ?)"
    " AND name NOT IN (SELECT name FROM incidents ORDER BY opened_at DESC LIMIT ?)"
)
# Decoding an error's text can fail, because it can quote the damaged file.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
# These queries fail if the file has another schema.
_SCHEMA_CHECKS = (
    "SELECT key, body, checksum FROM state LIMIT 0",
    "SELECT name, opened_at, ended, revision, published, body, checksum FROM incidents LIMIT 0",
)
# A failing volume or a locked file. All other codes mean a damaged file.
_VOLUME_ERRORS = frozenset(
    (
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_INTERRUPT,
    )
)  # fmt: skip


class JournalError(Exception):
    """A journal that cannot be read or written. The message names the file."""


def _ignore_damage(part: str) -> None:
    return


class Journal:
    """Journal of one supervisor, for use by one thread."""

    def __init__(
        self,
        path: Path,
        is_publishing: bool = False,
        on_damage: Callable[[str], None] = _ignore_damage,
    ) -> None:
        """Open the journal at ``path``, or create it. Raises :class:`JournalError`.

        ``on_damage`` is called with ``row`` or ``file`` for each damaged part.
        """
        self.path, self._publishes, self._on_damage = path, is_publishing, on_damage
        self._damaged_parts = DamagedParts(path.with_name(SET_ASIDE_FOLDER))
        self._restarts = RestartCopy(path.with_name(RESTARTS_FILE))
        self._unreadable: set[bytes] = set()
        self.clock: ClockReading | None = None
        """Clock reading in the journal, after :meth:`load`; None without one."""
        self.learned = LearnedBudgets()
        """Learned budgets in the journal, after :meth:`load`."""
        self._damage: Exception | None = None
        if self._restarts.exists and _read_file_bytes(path) == 0:
            self._report_lost_file("the file was empty or missing")
        try:
            self._db = _open_connection(path)
        except SQLITE_ERRORS as error:
            if not _is_damage_error(error):
                raise self._make_access_error(error) from error
            self._db = self._replace_file(error)
        self._inode = _read_inode(path)

    def close(self) -> None:
        """Close the file. Completed writes are already on disk."""
        self._db.close()

    @property
    def set_aside_names(self) -> list[str]:
        """Names of the damaged parts in ``set-aside``, oldest first."""
        return self._damaged_parts.list_names()

    def load(self) -> tuple[GovernorState, LastKnownEngine]:
        """Return the stored states of the governor and of the engine, or empty ones.

        Raises :class:`JournalError`.
        """
        try:
            rows = self._db.execute("SELECT key, body, checksum FROM state").fetchall()
        except SQLITE_ERRORS as error:
            raise self._make_read_error(error) from error
        state, engine = GovernorState(), LastKnownEngine()
        for key, body, checksum in rows:
            try:
                if key == b"governor":
                    state = storage.decode_row(body, checksum, GovernorState)
                elif key == b"engine":
                    engine = storage.decode_row(body, checksum, LastKnownEngine)
                elif key == b"learned":
                    self.learned = storage.decode_row(body, checksum, LearnedBudgets)
                elif key == b"clock":
                    self.clock = storage.decode_row(body, checksum, ClockReading)
            except DamagedRowError as error:
                self._move_row_aside("state", "key", key, body, error)
        lacking = self._restarts.add_missing_restarts(state)
        if lacking:
            log.warning(
                "added %d restarts to the journal that only the copy %s contained",
                lacking,
                RESTARTS_FILE,
            )
        return state, engine

    def write(
        self,
        state: GovernorState,
        incidents: Iterable[Incident] = (),
        engine: LastKnownEngine | None = None,
        clock: ClockReading | None = None,
        learned: LearnedBudgets | None = None,
    ) -> None:
        """Write the state and the changed incidents to disk in one transaction.

        ``clock`` is the clock on which the times are based. None keeps the stored value of an
        argument. Raises :class:`JournalError`.
        """
        changed = {incident.name: incident for incident in incidents}
        try:
            self._restarts.write(state)
        except OSError as error:
            raise self._make_access_error(error) from error
        if self._damage is None and _read_inode(self.path) != self._inode:
            reason = "the file was emptied or replaced while the supervisor used it"
            self._report_lost_file(reason)
            self._damage = sqlite3.DatabaseError(reason)
        if self._damage is None:
            try:
                self._write_transaction(state, changed.values(), engine, clock, learned)
                return
            except SQLITE_ERRORS as error:
                if get_error_code(error) == sqlite3.SQLITE_READONLY:
                    self._reconnect()
                if not _is_damage_error(error):
                    raise self._make_access_error(error) from error
                self._damage = error
        self._db.close()
        self._db = self._replace_file(self._damage)
        self._inode, self._damage = _read_inode(self.path), None
        every = {incident.name: incident for incident in state.incidents} | changed
        try:
            self._write_transaction(state, every.values(), engine, clock, learned)
        except SQLITE_ERRORS as error:
            raise self._make_access_error(error) from error

    def read_unpublished(self) -> list[tuple[int, Incident]]:
        """Return incidents with their unpublished revisions, open incidents last.

        At most :data:`MAX_INCIDENTS_PER_READ` are returned: open ones first, then the newest.
        """
        incidents = self._select_incidents(
            "published < revision ORDER BY ended, opened_at DESC LIMIT ?", (MAX_INCIDENTS_PER_READ,)
        )
        return incidents[::-1]

    def read_recent(self, max_incidents: int) -> list[Incident]:
        """Return at most ``max_incidents`` of the newest incidents, newest first."""
        incidents = self._select_incidents("1 ORDER BY opened_at DESC LIMIT ?", (max_incidents,))
        return [incident for _, incident in incidents]

    def mark_published(self, name: str, revision: int) -> None:
        """Store that the revision of the incident was published. Raises :class:`JournalError`."""
        try:
            with self._db:
                self._db.execute(
                    "UPDATE incidents SET published = MAX(published, ?) WHERE name = ?",
                    (revision, name),
                )
        except SQLITE_ERRORS as error:
            raise self._make_read_error(error) from error

    def _write_transaction(
        self,
        state: GovernorState,
        incidents: Iterable[Incident],
        engine: LastKnownEngine | None,
        clock: ClockReading | None,
        learned: LearnedBudgets | None,
    ) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._put_state("governor", state)
            if engine is not None:
                self._put_state("engine", engine)
            if clock is not None:
                self._put_state("clock", clock)
            if learned is not None:
                self._put_state("learned", learned)
            for incident in incidents:
                self._db.execute(
                    "INSERT INTO incidents"
                    " (name, opened_at, ended, revision, published, body, checksum)"
                    " VALUES (?, ?, ?, 1, 0, ?, ?) ON CONFLICT (name) DO"
                    " UPDATE SET ended = excluded.ended, body = excluded.body,"
                    " checksum = excluded.checksum, revision = revision + 1",
                    (
                        incident.name,
                        incident.opened_at,
                        incident.ended,
                        *storage.encode_row(incident),
                    ),
                )
            self._db.execute(_DELETE_OLD_INCIDENTS, (self._publishes, MAX_INCIDENTS))
            self._db.execute(_DELETE_OLD_INCIDENTS, (False, MAX_UNPUBLISHED_INCIDENTS))

    def _put_state(self, key: str, value: storage.Row) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO state (key, body, checksum) VALUES (?, ?, ?)",
            (key, *storage.encode_row(value)),
        )

    def _select_incidents(
        self, condition: str, values: tuple[int, ...]
    ) -> list[tuple[int, Incident]]:
        try:
            rows = self._db.execute(
                f"SELECT name, revision, body, checksum FROM incidents WHERE {condition}",  # noqa: S608 - our own text
                values,
            ).fetchall()
        except SQLITE_ERRORS as error:
            raise self._make_read_error(error) from error
        read = []
        for name, revision, body, checksum in rows:
            try:
                incident = storage.decode_row(body, checksum, Incident)
                if incident.name.encode() != name or not isinstance(revision, int):
                    raise DamagedRowError(
                        "the name in the row differs from the name of its incident, or its "
                        "revision is not an integer"
                    )
            except DamagedRowError as error:
                self._move_row_aside("incidents", "name", name, body, error)
            else:
                read.append((revision, incident))
        return read

    # ---- damage

    def _move_row_aside(
        self, table: str, column: str, key: object, body: object, damage: DamagedRowError
    ) -> None:
        # If the file cannot be written, the row stays in the journal and is skipped.
        name = key if isinstance(key, bytes) else repr(key).encode()
        if name in self._unreadable:
            return
        self._on_damage(DAMAGED_ROW)
        row_name = f"{table}-{name.decode(errors='replace')}"
        data = body if isinstance(body, bytes) else repr(body).encode()
        try:
            file = self._damaged_parts.store(f"{row_name}.json", data)
            with self._db:
                self._db.execute(
                    f"DELETE FROM {table} WHERE CAST({column} AS BLOB)"  # noqa: S608 - our own text
                    " = CAST(? AS BLOB)",
                    (key,),
                )
        except (OSError, *SQLITE_ERRORS) as error:
            self._unreadable.add(name)
            log.error(
                "skipped row %s of the journal %s, because the row is damaged: %s",
                row_name,
                self.path,
                damage,
            )
            log.warning(
                "cannot move the damaged row %s of the journal to the folder '%s', so the "
                "row stays in the journal: %s",
                row_name,
                SET_ASIDE_FOLDER,
                error,
            )
        else:
            log.error(
                "moved row %s of the journal %s to %s, because the row is damaged: %s",
                row_name,
                self.path,
                file,
                damage,
            )

    def _replace_file(self, cause: Exception) -> sqlite3.Connection:
        try:
            if _read_file_bytes(self.path):
                file = self._damaged_parts.move_file(self.path, ("-wal",))
                log.error(
                    "moved the journal %s to %s, because the journal is damaged: %s",
                    self.path,
                    file,
                    cause,
                )
                self._on_damage(DAMAGED_FILE)
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            return _open_connection(self.path)
        except (OSError, *SQLITE_ERRORS) as error:
            raise self._make_access_error(error) from error

    def _report_lost_file(self, reason: str) -> None:
        log.error("lost the journal %s with all earlier incidents: %s", self.path, reason)
        self._on_damage(DAMAGED_FILE)
        with contextlib.suppress(OSError):
            self._damaged_parts.store("journal-lost.txt", f"{self.path}: {reason}\n".encode())

    def _reconnect(self) -> None:
        # The volume may have become writable, but a connection to a read-only volume stays
        # read-only.
        with contextlib.suppress(*SQLITE_ERRORS):
            again = _open_connection(self.path)
            self._db.close()
            self._db, self._inode = again, _read_inode(self.path)

    def _make_read_error(self, error: Exception) -> JournalError:
        # The next write replaces a damaged file.
        if not _is_damage_error(error):
            return self._make_access_error(error)
        self._damage = error
        return JournalError(
            f"the journal {self.path} is damaged, and the next write replaces it: {error}"
        )

    def _make_access_error(self, error: Exception) -> JournalError:
        return JournalError(
            f"cannot read or write the journal {self.path}: {error}; free space on its "
            "volume or make it writable; until then, the supervisor takes no action"
        )


def get_error_code(error: Exception) -> int | None:
    """Return SQLite's primary result code; None if Python's module raised the error itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _is_damage_error(error: Exception) -> bool:
    return get_error_code(error) not in _VOLUME_ERRORS


def _read_inode(path: Path) -> int | None:
    # An empty file counts as missing.
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino if status.st_size else None


def _read_file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _open_connection(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        db.text_factory = bytes  # damaged text may not be valid UTF-8
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != b"ok":
            raise sqlite3.DatabaseError(verdict.decode(errors="replace"))
        db.executescript(_SCHEMA)
        for table in ("state", "incidents"):  # of an early version
            columns = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
            if b"checksum" not in columns:
                db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")
        for readable in _SCHEMA_CHECKS:
            db.execute(readable)
    except SQLITE_ERRORS:
        db.close()
        raise
    return db
