"""Store the reasons why the pod is not ready, one file for each reason.

A file contains the time at which its reason ends (CLOCK_BOOTTIME) and the boot ID, so that the pod
becomes ready again if the supervisor dies. After a reboot, only a manual drain stays active.
"""

from __future__ import annotations

# The launcher imports this module, so it imports little itself.
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from plimsoll_api.names import UNREADY_REASONS

if TYPE_CHECKING:
    from plimsoll_sidecar.govern.command import Result

MANUAL, DRAIN, RESTART = REASONS = UNREADY_REASONS
DRAIN_REASONS = (MANUAL, DRAIN)
# In the state directory.
REASONS_FOLDER = "unready"
# After a reboot, a manual drain starts this time again.
MAX_UNREADY_DURATION_S = 30 * 86_400.0
# Time until the pod becomes ready again if the supervisor dies during an engine restart.
RESTART_UNREADY_TIMEOUT_S = 900.0
# Until the kubelet notices that the engine has ended, the container counts as ready.
MAX_KUBELET_LAG_S = 10.0


def set_unready(state_dir: str, reason: str, duration_s: float) -> None:
    """Make the pod unready for ``duration_s`` seconds. Raises OSError."""
    ends_at = time.clock_gettime(time.CLOCK_BOOTTIME) + min(duration_s, MAX_UNREADY_DURATION_S)
    _write_reason(state_dir, reason, ends_at)


def _write_reason(state_dir: str, reason: str, ends_at: float) -> None:
    folder = os.path.join(state_dir, REASONS_FOLDER)
    os.makedirs(folder, exist_ok=True)
    # Concurrent writers use separate temporary files, so neither removes the other's.
    fresh = os.path.join(folder, f".{reason}-{os.urandom(4).hex()}")
    try:
        with open(fresh, "w") as out:
            out.write(f"{ends_at:.3f} {_read_boot_id()}\n")
        os.replace(fresh, os.path.join(folder, reason))
    except OSError:
        _remove_file(fresh)
        raise


def clear_reasons(state_dir: str, *reasons: str) -> None:
    """End ``reasons``. Raises OSError."""
    for reason in reasons:
        _remove_file(os.path.join(state_dir, REASONS_FOLDER, reason))


def end_drain(state_dir: str, drain_reason: str) -> None:
    """End the drain for ``drain_reason``, without resuming the engine. Raises OSError."""
    if os.path.exists(os.path.join(state_dir, REASONS_FOLDER, drain_reason)):
        _write_reason(state_dir, drain_reason, 0.0)


def list_ended_drains(state_dir: str) -> list[str]:
    """Return the reasons whose drain has ended without resuming the engine."""
    written = [
        reason
        for reason in DRAIN_REASONS
        if os.path.exists(os.path.join(state_dir, REASONS_FOLDER, reason))
    ]
    if not written:
        return []
    active = read_active_reasons(state_dir)
    return [reason for reason in written if reason not in active]


def read_active_reasons(state_dir: str) -> dict[str, float]:
    """Return the active reasons with their remaining seconds, without unreadable ones."""
    found = {}
    for reason in REASONS:
        try:
            with open(os.path.join(state_dir, REASONS_FOLDER, reason)) as source:
                end, _, boot_id = source.read(128).strip().partition(" ")
            until = float(end)
        except (OSError, ValueError):
            continue
        left = until - time.clock_gettime(time.CLOCK_BOOTTIME)
        if boot_id != _read_boot_id():
            left = MAX_UNREADY_DURATION_S if reason == MANUAL and until > 0 and boot_id else 0.0
        if 0 < left <= MAX_UNREADY_DURATION_S + 1.0:  # the written time is rounded
            found[reason] = left
    return found


def is_ready(state_dir: str) -> bool:
    """Report whether no reason makes the pod unready."""
    return not read_active_reasons(state_dir)


def end_engine_while_unready(
    state_dir: str, end_engine: Callable[[], Result], unready_after_s: float = MAX_KUBELET_LAG_S
) -> Result:
    """Make the pod unready, call ``end_engine``, and return its result.

    The pod stays unready for ``unready_after_s`` seconds after a successful end.
    """
    from plimsoll_sidecar.govern.command import Outcome  # the launcher does not need it

    set_unready(state_dir, RESTART, RESTART_UNREADY_TIMEOUT_S)
    ended = False
    try:
        result = end_engine()
        ended = result.outcome is Outcome.SUCCEEDED
    finally:
        if ended:
            set_unready(state_dir, RESTART, unready_after_s)
            clear_reasons(state_dir, DRAIN)
        else:
            clear_reasons(state_dir, RESTART)
            end_drain(state_dir, DRAIN)
    return result


def _read_boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as source:
            return source.read(64).strip()
    except OSError:
        return ""


def _remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
