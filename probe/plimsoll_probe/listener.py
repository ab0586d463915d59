"""The socket of one process: one daemon thread that waits in ``accept``.

A request is one line of JSON, ``{"do": WHAT}``; the answer is one JSON object, and then the
connection ends. WHAT is one of :data:`plimsoll_probe.answers.ANSWERS`. Only the same user and root
are answered. The socket is ``PID.sock`` in the folder; a fork listens on one of its own, and a
child that executes another Python starts the probe again.
"""

import atexit
import contextlib
import json
import os
import socket
import struct
import threading
import time
from typing import Any, Optional

from plimsoll_probe.answers import answer
from plimsoll_probe.hung import StackFile

MAX_REQUEST = 4096
WAIT_S = 2.0
"""For a peer that connects and says or reads nothing."""
PAUSE_S = 1.0
"""After an accept that failed, as without file descriptors: no busy loop."""
FORK_S = 1.0
BACKLOG = 4


class _Listener:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = ""
        self._socket: Optional[socket.socket] = None
        self._busy = threading.Lock()
        self._held = False
        self._stacks = StackFile(folder)

    def open(self) -> None:
        _remove_ended(self._folder)
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._stacks.open()
        self._path = os.path.join(self._folder, f"{os.getpid()}.sock")
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # of a process that had this PID before
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self._path)
        os.chmod(self._path, 0o600)
        listening.listen(BACKLOG)
        self._socket = listening
        threading.Thread(target=self._serve, name="plimsoll-probe", daemon=True).start()

    def close(self) -> None:
        if self._path == os.path.join(self._folder, f"{os.getpid()}.sock"):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._stacks.close()

    def before_fork(self) -> None:
        """No fork while an answer is made: it may hold a lock that the child would wait for."""
        self._held = self._busy.acquire(timeout=FORK_S)

    def after_fork_in_parent(self) -> None:
        if self._held:
            self._held = False
            self._busy.release()

    def after_fork_in_child(self) -> None:
        """Forget the thread and its socket, which are the parent's alone."""
        try:
            self._held, self._busy = False, threading.Lock()
            inherited, self._socket = self._socket, None
            if inherited is not None:
                inherited.close()
            self.open()
        except Exception:  # noqa: BLE001, S110 - the engine must not notice
            pass

    def _serve(self) -> None:
        listening = self._socket
        while listening is not None and listening is self._socket:
            try:
                peer, _ = listening.accept()
            except OSError:
                time.sleep(PAUSE_S)
                continue
            try:
                with peer, self._busy:
                    _serve_one(peer)
            except Exception:  # noqa: BLE001 - whatever the peer did
                time.sleep(0.01)


def _serve_one(peer: socket.socket) -> None:
    peer.settimeout(WAIT_S)
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", credentials)[1]
    if uid not in (0, os.geteuid()):
        return
    line = _line(peer)
    if line is not None:
        peer.sendall(json.dumps(_answered(line)).encode())


def _line(peer: socket.socket) -> Optional[bytes]:
    """Return the request; None where it does not end within its bounds."""
    deadline = time.monotonic() + WAIT_S
    data = b""
    while not data.endswith(b"\n"):
        piece = peer.recv(MAX_REQUEST + 1 - len(data))
        data += piece
        if not piece or len(data) > MAX_REQUEST or time.monotonic() > deadline:
            return None
    return data


def _answered(line: bytes) -> "dict[str, Any]":
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            return {"error": "a request is a JSON object"}
        return answer(request)
    except Exception as error:  # noqa: BLE001 - told to the peer
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _remove_ended(folder: str) -> None:
    """Files of processes that were killed stay behind."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            pid, _, ending = name.partition(".")
            if (
                ending in ("sock", "stacks")
                and pid.isdigit()
                and not os.path.exists(f"/proc/{pid}")
            ):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def listen(folder: str) -> None:
    """Listen for the rest of this process's life; OSError where the folder cannot be used."""
    listener = _Listener(folder)
    listener.open()
    atexit.register(listener.close)
    os.register_at_fork(
        before=listener.before_fork,
        after_in_parent=listener.after_fork_in_parent,
        after_in_child=listener.after_fork_in_child,
    )
