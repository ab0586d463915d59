"""Reports the memory of an engine's process to the supervisor beside it.

The package is copied into the engine's container and loaded in every Python process there. The
plugin entry points of the engine load it (``vllm.general_plugins``, ``sglang.srt.plugins``), and so
does ``sitecustomize``. Each process listens on a Unix socket and does nothing until it is queried;
see :mod:`plimsoll_probe.listener`. It needs only the standard library of Python 3.10.

``PLIMSOLL_PROBE_DIR`` is the folder of the sockets. Without it, or with ``PLIMSOLL_PROBE=off``,
nothing starts.
"""

import os
import threading

SWITCH = "PLIMSOLL_PROBE"
"""Environment variable that disables the probe."""
DIRECTORY = "PLIMSOLL_PROBE_DIR"
"""Environment variable with the folder of the sockets."""
OFF = frozenset({"off", "0", "false", "no"})

_lock = threading.Lock()
_started = False


def start() -> None:
    """Start listening in this process and its forks. Never raises; further calls do nothing."""
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
