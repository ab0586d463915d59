"""Ends an engine while its pod is out of service.

No request then reaches a port that no process serves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.govern.command import Outcome, Result

RETURN_S = 900.0
"""Longest time a pod stays unready for an engine restart when the supervisor dies meanwhile."""
SEEN_S = 10.0
"""Time in which the kubelet sees that an engine has ended: until then it takes its container for
ready, by the last answer to the engine's own probe."""


def unready(state_dir: Path, end: Callable[[], Result]) -> Result:
    """Return the result of ``end``, during which the pod is unready.

    It stays so until :data:`SEEN_S` after the engine ended, also where no drain came first. It is
    ready again at once where the engine goes on.
    """
    folder, ended = str(state_dir), False
    if readiness.is_ready(folder):
        readiness.write(folder, RETURN_S)
    try:
        result = end()
        ended = result.outcome is Outcome.SUCCEEDED
    finally:
        if ended:
            readiness.write(folder, SEEN_S)  # then the next engine's own probe decides
        else:
            readiness.remove(folder)
    return result
