"""Actions by hand, from whoever carries them out to the supervisor: one file each.

``plimsoll_sidecar.ask`` is a process of its own in the supervisor's container. It writes down what
it is about to do, and then what became of it, so that the supervisor records it and takes no
restart by hand for a crash.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from plimsoll_api.decoding import decode
from plimsoll_sidecar.govern.command import Outcome
from plimsoll_sidecar.govern.manual import ACTIONS, ManualAction
from plimsoll_sidecar.signals.process_table import ProcessId, identify

log = logging.getLogger(__name__)

FOLDER = "by-hand"
MAX_FILES = 64
MAX_BYTES = 1 << 14


class Note(msgspec.Struct, frozen=True):
    """An action, and the process that carries it out."""

    action: ManualAction
    by: ProcessId | None


def write(state_dir: Path, action: ManualAction) -> None:
    """Note an action of this process, or what became of it. Raises OSError."""
    folder = state_dir / FOLDER
    folder.mkdir(exist_ok=True)
    fresh = folder / f"{action.id}.new"
    fresh.write_bytes(msgspec.json.encode(Note(action, identify(os.getpid()))))
    os.replace(fresh, folder / f"{action.id}.json")


class Inbox:
    """The supervisor's end.

    ``read`` gives each ended action once; ``forget`` removes the files of those, after they are in
    the journal.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER
        self._given: set[Path] = set()

    def read(self) -> list[ManualAction]:
        """Return what is under way, and what has ended since the last call.

        A file that cannot be used is removed: nothing else writes here, and nothing waits for it.
        """
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".json"))
        except OSError:
            return []
        found = []
        for name in names[:MAX_FILES]:
            path = self._folder / name
            if path in self._given:
                continue
            try:
                action = _read(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log.warning("%s: removed because it is not a manual action: %s", path, error)
                _remove(path)
                continue
            if action.outcome is not None:
                self._given.add(path)
            found.append(action)
        return found

    def forget(self) -> None:
        """Remove the notes that were handed out: what they asked for is in the journal now."""
        for path in self._given:
            _remove(path)
        self._given.clear()


def _read(path: Path) -> ManualAction:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 10} KiB")
    note = decode(data, Note)
    action = note.action
    if action.action not in ACTIONS or path.stem != action.id:
        raise ValueError(f"action {action.action!r} of {action.id!r}")
    if action.outcome is None and (note.by is None or identify(note.by.pid) != note.by):
        return msgspec.structs.replace(
            action, outcome=Outcome.UNKNOWN, message="the command was interrupted"
        )
    return action


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
