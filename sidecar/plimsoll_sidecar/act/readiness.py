"""Why the pod is out of service: a set of reasons, each with its own end.

The pod is unready while any reason holds. Each reason has one owner and a file of its own, so that
the end of one never ends another: a person's drain outlasts an incident's restart. A file holds the
end of its reason in seconds of CLOCK_BOOTTIME, and the boot that counted them: the pod of a
supervisor that dies becomes ready again, and changes of the wall clock have no effect. After a
restart of the node only a person's drain holds still.

During a drain, the engine itself takes no requests either. So the file of a drain that has ended,
by its time or before, stays until the supervisor has resumed the engine.

The launcher imports this module: it must stay small.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from plimsoll_api.names import UNREADY_REASONS

if TYPE_CHECKING:
    from plimsoll_sidecar.govern.command import Result

MANUAL, DRAIN, RESTART = REASONS = UNREADY_REASONS
DRAINS = (MANUAL, DRAIN)
"""Reasons for which the engine is drained, too."""
FOLDER = "unready"
"""In the state directory: a file for each reason that holds."""
MAX_S = 30 * 86_400.0
"""No reason holds for longer than this: a drain may take as long as its policy allows. A person's
drain is not ended by time before."""
RETURN_S = 900.0
"""Longest time a pod stays unready for an engine restart when the supervisor dies meanwhile."""
SEEN_S = 10.0
"""Time in which the kubelet notices that an engine has ended: until then, its container counts as
ready by the last answer to the engine's own probe."""


def hold(state_dir: str, reason: str, seconds: float) -> None:
    """Keep the pod unready for ``reason`` from now on, for at most ``seconds``. Raises OSError."""
    _write(state_dir, reason, time.clock_gettime(time.CLOCK_BOOTTIME) + min(seconds, MAX_S))


def _write(state_dir: str, reason: str, until: float) -> None:
    folder = os.path.join(state_dir, FOLDER)
    os.makedirs(folder, exist_ok=True)
    # Two writers at once have two temporary files: neither removes the other's.
    fresh = os.path.join(folder, f".{reason}-{os.urandom(4).hex()}")
    try:
        with open(fresh, "w") as out:
            out.write(f"{until:.3f} {_boot_id()}\n")
        os.replace(fresh, os.path.join(folder, reason))
    except OSError:
        _remove(fresh)
        raise


def clear(state_dir: str, *reasons: str) -> None:
    """End these reasons; the pod is ready once no other holds. Raises OSError."""
    for reason in reasons:
        _remove(os.path.join(state_dir, FOLDER, reason))


def lapse(state_dir: str, drain: str) -> None:
    """End a drain, if there is one, whose engine is still to be resumed. Raises OSError."""
    if os.path.exists(os.path.join(state_dir, FOLDER, drain)):
        _write(state_dir, drain, 0.0)


def lapsed(state_dir: str) -> list[str]:
    """Return the drains that have ended and whose engine was not resumed yet."""
    held = holding(state_dir)
    files = ((one, os.path.join(state_dir, FOLDER, one)) for one in DRAINS if one not in held)
    return [drain for drain, path in files if os.path.exists(path)]


def holding(state_dir: str) -> dict[str, float]:
    """Return the seconds for which each reason still holds. One that cannot be read does not."""
    found = {}
    for reason in REASONS:
        try:
            with open(os.path.join(state_dir, FOLDER, reason)) as source:
                end, _, boot_id = source.read(128).strip().partition(" ")
            until = float(end)
        except (OSError, ValueError):
            continue
        left = until - time.clock_gettime(time.CLOCK_BOOTTIME)
        if boot_id != _boot_id():
            left = MAX_S if reason == MANUAL and until > 0 and boot_id else 0.0
        if 0 < left <= MAX_S + 1.0:  # what is written is rounded
            found[reason] = left
    return found


def is_ready(state_dir: str) -> bool:
    """Return True unless the pod is out of service for some reason."""
    return not holding(state_dir)


def while_ending(state_dir: str, end: Callable[[], Result]) -> Result:
    """Return the result of ``end``, which ends the engine, with the pod unready meanwhile.

    So no request reaches a port that no process serves. The pod stays unready until :data:`SEEN_S`
    after the engine ended, also without a drain before. If the engine did not end, neither the
    restart nor the drain before it keeps the pod out of service.
    """
    from plimsoll_sidecar.govern.command import Outcome  # not for the launcher

    hold(state_dir, RESTART, RETURN_S)
    ended = False
    try:
        result = end()
        ended = result.outcome is Outcome.SUCCEEDED
    finally:
        if ended:
            hold(state_dir, RESTART, SEEN_S)  # then the next engine's own probe decides
            clear(state_dir, DRAIN)
        else:
            clear(state_dir, RESTART)
            lapse(state_dir, DRAIN)
    return result


def _boot_id() -> str:
    """Return the kernel's name for the time since the node started; empty if it is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as source:
            return source.read(64).strip()
    except OSError:
        return ""


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
