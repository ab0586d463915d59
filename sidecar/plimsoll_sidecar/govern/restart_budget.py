"""Count a replica's restarts against its restart budget: a number of restarts within a window.

A spent budget allows no restart until a person resets it.
"""

from __future__ import annotations

import msgspec

from plimsoll_api.supervision import RestartBudget

# Far beyond any useful budget; a crash loop must not fill the journal.
MAX_STORED_RESTARTS = 256


class Restart(msgspec.Struct, omit_defaults=True):
    """A restart of ``epoch`` that an incident or a person requested.

    ``at`` is the time in Unix seconds. ``operation_id`` is None without a command.
    """

    at: float
    epoch: str
    operation_id: str | None = None


class ReplicaRestarts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Restarts of one replica, for storage outside its journal.

    ``at`` holds their times in Unix seconds, oldest first.
    """

    at: tuple[float, ...] = ()
    exhausted: bool = False

    def list_within_window(self, window_s: float, now: float) -> tuple[float, ...]:
        """Return the times of the restarts in the ``window_s`` seconds before ``now``."""
        return tuple(at for at in self.at if now - at < window_s)

    def merge(self, other: ReplicaRestarts) -> ReplicaRestarts:
        """Return the union; restarts with equal times are the same restart."""
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
    """Add a restart, unless its epoch has one, and remove restarts before the window."""
    if any(previous.epoch == restart.epoch for previous in restarts):
        return
    restarts.append(restart)
    restarts[:] = [previous for previous in restarts if restart.at - previous.at < budget.window_s][
        -MAX_STORED_RESTARTS:
    ]


def withdraw_restart(restarts: list[Restart], epoch: str) -> None:
    """Remove the restart of ``epoch``, which was refused or not started."""
    restarts[:] = [restart for restart in restarts if restart.epoch != epoch]
