"""The reasons why the pod is not ready, each of which ends independently.

The pod is not ready while any reason is active. Each reason has one owner and one file, so that the
end of one reason never ends another. For example, a manual drain outlasts the restart for an
incident. A file holds the time at which its reason ends, in seconds of CLOCK_BOOTTIME, and the boot
id. So the pod becomes ready again if the supervisor dies, and changes of the wall clock have no
effect. After a reboot of the node, only a manual drain stays active.

During a drain, the engine does not accept requests either. So the file of an ended drain remains
until the supervisor has resumed the engine.

The launcher imports this module, so it must stay small.
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
"""Folder in the state directory with one file for each active reason."""
MAX_REASON_S = 30 * 86_400.0
"""Maximum number of seconds for which a reason is active, unless it is a manual drain."""
MAX_RESTART_S = 900.0
"""Seconds until the pod becomes ready again if the supervisor dies during an engine restart."""
KUBELET_LAG_S = 10.0
"""Seconds within which the kubelet notices that the engine has ended. Until then, its container
counts as ready, because its own probe succeeded last time."""


def set_unready(state_dir: str, reason: str, seconds: float) -> None:
    """Make the pod unready for ``reason``, for at most ``seconds``. Raises OSError."""
    _write(state_dir, reason, time.clock_gettime(time.CLOCK_BOOTTIME) + min(seconds, MAX_REASON_S))


def _write(state_dir: str, reason: str, until: float) -> None:
    folder = os.path.join(state_dir, FOLDER)
    os.makedirs(folder, exist_ok=True)
    # Concurrent writers have separate temporary files: neither removes the other's.
    fresh = os.path.join(folder, f".{reason}-{os.urandom(4).hex()}")
    try:
        with open(fresh, "w") as out:
            out.write(f"{until:.3f} {_boot_id()}\n")
        os.replace(fresh, os.path.join(folder, reason))
    except OSError:
        _remove(fresh)
        raise


def clear(state_dir: str, *reasons: str) -> None:
    """End these reasons; the pod is ready when none is active. Raises OSError."""
    for reason in reasons:
        _remove(os.path.join(state_dir, FOLDER, reason))


def end_drain(state_dir: str, drain: str) -> None:
    """End a drain, if it is active; its engine is still to be resumed. Raises OSError."""
    if os.path.exists(os.path.join(state_dir, FOLDER, drain)):
        _write(state_dir, drain, 0.0)


def ended_drains(state_dir: str) -> list[str]:
    """Return the drains that have ended and whose engine has not been resumed."""
    held = active_reasons(state_dir)
    files = ((one, os.path.join(state_dir, FOLDER, one)) for one in DRAINS if one not in held)
    return [drain for drain, path in files if os.path.exists(path)]


def active_reasons(state_dir: str) -> dict[str, float]:
    """Return the remaining seconds of each active reason. An unreadable file is not active."""
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
            left = MAX_REASON_S if reason == MANUAL and until > 0 and boot_id else 0.0
        if 0 < left <= MAX_REASON_S + 1.0:  # the written time is rounded
            found[reason] = left
    return found


def is_ready(state_dir: str) -> bool:
    """Report whether no reason is active."""
    return not active_reasons(state_dir)


def run_unready(state_dir: str, end: Callable[[], Result]) -> Result:
    """Call ``end``, which ends the engine, while the pod is unready, and return its result.

    No request then arrives at a port without a listener. If the engine ends, the pod stays unready
    for :data:`KUBELET_LAG_S` more. If it does not end, neither the restart nor a drain before it
    keeps the pod unready.
    """
    from plimsoll_sidecar.govern.command import Outcome  # the launcher does not need it

    set_unready(state_dir, RESTART, MAX_RESTART_S)
    ended = False
    try:
        result = end()
        ended = result.outcome is Outcome.SUCCEEDED
    finally:
        if ended:
            set_unready(
                state_dir, RESTART, KUBELET_LAG_S
            )  # afterwards, the probe of the next engine decides
            clear(state_dir, DRAIN)
        else:
            clear(state_dir, RESTART)
            end_drain(state_dir, DRAIN)
    return result


def _boot_id() -> str:
    """Return the id of the current boot; empty if it is unknown."""
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
