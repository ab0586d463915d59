"""Count a replica's restarts against its restart budget: a number of restarts within a window.

A spent budget allows no restart until a person resets it. Restarts are recorded in
:mod:`plimsoll_sidecar.govern.phases`. :mod:`plimsoll_sidecar.act.lease_counts`
counts the restarts of the whole service.
"""

from __future__ import annotations

import msgspec

from plimsoll_api.supervision import RestartBudget

MAX_STORED_RESTARTS = 256
"""Maximum number of stored restarts, far beyond any useful budget.

It prevents a crash loop from filling the journal."""


class Restart(msgspec.Struct, omit_defaults=True):
    """One restart of the engine or its worker that an incident or a person requested.

    It is stored before its command is sent. ``at`` is the time in Unix seconds, and ``epoch`` the
    epoch that the restart ends. ``operation_id`` is the ID of the command; None without a command.
    """

    at: float
    epoch: str
    operation_id: str | None = None


class ReplicaRestarts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Restarts of one replica, for storage outside its journal.

    ``at`` holds the times of the restarts in Unix seconds, oldest first. While ``exhausted`` is
    set, no restart is allowed until a person resets the restart budget.
    """

    at: tuple[float, ...] = ()
    exhausted: bool = False

    def list_within_window(self, window_s: float, now: float) -> tuple[float, ...]:
        """Return the times of the restarts in the ``window_s`` seconds before ``now``."""
        return tuple(at for at in self.at if now - at < window_s)

    def merge(self, other: ReplicaRestarts) -> ReplicaRestarts:
        """Return the union of two lists of restarts of the same replica.

        Two restarts with equal times are the same restart.
        """
        at = tuple(sorted({*self.at, *other.at}))
        return ReplicaRestarts(at, self.exhausted or other.exhausted)


NO_RESTARTS = ReplicaRestarts()


def count_restarts_within_window(restarts: list[Restart], budget: RestartBudget, now: float) -> int:
    """Return the number of restarts in the window of ``budget`` that ends at ``now``.

    Restarts after ``now`` count too: otherwise, setting the clock back would allow more restarts.
    """
    return sum(1 for restart in restarts if now - restart.at < budget.window_s)


def count_remaining_restarts(restarts: list[Restart], budget: RestartBudget, now: float) -> int:
    """Return the number of restarts that ``budget`` still allows at ``now`` (Unix seconds)."""
    return max(0, budget.count - count_restarts_within_window(restarts, budget, now))


def record_restart(restarts: list[Restart], restart: Restart, budget: RestartBudget) -> None:
    """Add ``restart`` to ``restarts``, unless the list has a restart of the same epoch.

    Restarts before the window of ``budget`` are removed.
    """
    if any(known.epoch == restart.epoch for known in restarts):
        return
    restarts.append(restart)
    restarts[:] = [known for known in restarts if restart.at - known.at < budget.window_s][
        -MAX_STORED_RESTARTS:
    ]


def withdraw_restart(restarts: list[Restart], epoch: str) -> None:
    """Remove the restart of ``epoch``, which was refused or not started."""
    restarts[:] = [known for known in restarts if known.epoch != epoch]
