"""Probe that reports the memory of an engine's processes to the supervisor in the same pod.

An init container copies the package into the engine's container. The engine's plugin entry points
(``vllm.general_plugins``, ``sglang.srt.plugins``) and ``sitecustomize`` load it in every Python
process there.

Each process listens on a Unix socket in the folder ``PLIMSOLL_PROBE_DIR``. If this variable is
unset, or if ``PLIMSOLL_PROBE`` is ``off``, the probe does not start. The package needs only the
standard library of Python 3.10.
"""

import os
import threading

ENABLED_VARIABLE = "PLIMSOLL_PROBE"
"""Environment variable that disables the probe if its value is in :data:`OFF_VALUES`."""
DIRECTORY_VARIABLE = "PLIMSOLL_PROBE_DIR"
OFF_VALUES = frozenset({"off", "0", "false", "no"})

_lock = threading.Lock()
_started = False


def start() -> None:
    """Start this process's listener, and those of its forked children. Idempotent; never raises."""
    global _started
    try:
        folder = os.environ.get(DIRECTORY_VARIABLE, "")
        if not folder or os.environ.get(ENABLED_VARIABLE, "").lower() in OFF_VALUES:
            return
        with _lock:
            if _started:
                return
            _started = True
        from plimsoll_probe.listener import listen

        listen(folder)
    except Exception:  # noqa: BLE001, S110 - the engine must not notice
        pass
