"""Listen on a Unix socket, with one daemon thread that waits in ``accept``.

A request is one line of JSON, ``{"do": NAME}``, and the answer is one JSON object. Only processes
of the same user or of root get an answer. A forked child listens on its own socket.
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

from plimsoll_probe.allocation_tracing import ALLOCATION_TRACER
from plimsoll_probe.answers import answer_request
from plimsoll_probe.hung import StackFile
from plimsoll_probe.memory import watch_freezes

MAX_REQUEST_BYTES = 4096
CLIENT_TIMEOUT_S = 2.0
ACCEPT_FAILURE_PAUSE_S = 1.0
"""Pause after a failed accept, for example if no file descriptor is left."""
MAX_FORK_DELAY_S = 0.05
"""Maximum time for which a fork waits until the current answer is complete; a report takes a
millisecond."""
LISTEN_BACKLOG = 4


class _Listener:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = ""
        self._socket: Optional[socket.socket] = None
        self._answer_lock = threading.Lock()
        self._holds_lock = False
        self._stacks = StackFile(folder)

    def open(self) -> None:
        _remove_stale_files(self._folder)
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._stacks.open()
        self._path = os.path.join(self._folder, f"{os.getpid()}.sock")
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # from an earlier process with this PID
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self._path)
        os.chmod(self._path, 0o600)
        listening.listen(LISTEN_BACKLOG)
        self._socket = listening
        threading.Thread(target=self._serve_clients, name="plimsoll-probe", daemon=True).start()

    def close(self) -> None:
        if self._path == os.path.join(self._folder, f"{os.getpid()}.sock"):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._stacks.close()

    # The child must not inherit a held lock.
    def lock_before_fork(self) -> None:
        self._holds_lock = self._answer_lock.acquire(timeout=MAX_FORK_DELAY_S)

    def unlock_after_fork(self) -> None:
        if self._holds_lock:
            self._holds_lock = False
            self._answer_lock.release()

    def reopen_in_child(self) -> None:
        try:
            self._holds_lock, self._answer_lock = False, threading.Lock()
            ALLOCATION_TRACER.abandon_in_child()
            inherited, self._socket = self._socket, None
            if inherited is not None:
                inherited.close()
            self.open()
        except Exception:  # noqa: BLE001, S110 - the engine must not notice
            pass

    def _serve_clients(self) -> None:
        listening = self._socket
        while listening is not None and listening is self._socket:
            try:
                client, _ = listening.accept()
            except OSError:
                time.sleep(ACCEPT_FAILURE_PAUSE_S)
                continue
            try:
                with client, self._answer_lock:
                    _serve_client(client)
            except Exception:  # noqa: BLE001 - errors of the client must not end the thread
                time.sleep(0.01)


def _serve_client(client: socket.socket) -> None:
    client.settimeout(CLIENT_TIMEOUT_S)
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", credentials)[1]
    if uid not in (0, os.geteuid()):
        return
    line = _read_line(client)
    if line is not None:
        client.sendall(json.dumps(_answer_line(line)).encode())


# None if the line is too long or arrives too slowly.
def _read_line(client: socket.socket) -> Optional[bytes]:
    deadline = time.monotonic() + CLIENT_TIMEOUT_S
    data = b""
    while not data.endswith(b"\n"):
        piece = client.recv(MAX_REQUEST_BYTES + 1 - len(data))
        data += piece
        if not piece or len(data) > MAX_REQUEST_BYTES or time.monotonic() > deadline:
            return None
    return data


def _answer_line(line: bytes) -> "dict[str, Any]":
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            return {"error": "the request is not a JSON object"}
        return answer_request(request)
    except Exception as error:  # noqa: BLE001 - the client gets the error
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _remove_stale_files(folder: str) -> None:
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
    """Listen until this process ends. Raises OSError if ``folder`` is unusable."""
    watch_freezes()
    listener = _Listener(folder)
    listener.open()
    atexit.register(listener.close)
    os.register_at_fork(
        before=listener.lock_before_fork,
        after_in_parent=listener.unlock_after_fork,
        after_in_child=listener.reopen_in_child,
    )
