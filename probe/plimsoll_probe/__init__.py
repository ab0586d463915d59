"""A window into an engine's processes, for the supervisor beside it.

The package is copied into the engine's container and loaded in every Python process there: by the
engine's plugin entry points (``vllm.general_plugins``, ``sglang.srt.plugins``) and by
``sitecustomize``. Each process listens on a Unix socket and answers only when it is asked; see
:mod:`plimsoll_probe.listener`. It needs the standard library alone, from Python 3.10 on.

``PLIMSOLL_PROBE_DIR`` names the folder for the sockets; without it, or with ``PLIMSOLL_PROBE=off``,
nothing starts.
"""

import os
import threading

SWITCH = "PLIMSOLL_PROBE"
DIRECTORY = "PLIMSOLL_PROBE_DIR"
OFF = frozenset({"off", "0", "false", "no"})

_lock = threading.Lock()
_started = False


def start() -> None:
    """Start listening in this process and in those that it forks.

    Never raises; calling it again does nothing.
    """
    global _started
    try:
        folder = os.environ.get(DIRECTORY, "")
        if not folder or os.environ.get(SWITCH, "").lower() in OFF:
            return
        with _lock:
            if _started:
                return
            _started = True
        from plimsoll_probe.listener import listen

        listen(folder)
    except Exception:  # noqa: BLE001, S110 - the engine must not notice
        pass
