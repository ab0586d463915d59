"""Count restarts against the restart budget: a number of restarts within a window.

Once it is spent, no restart is allowed until a person resets it.
"""

from __future__ import annotations

import msgspec

from plimsoll_api.supervision import RestartBudget

MAX_RESTARTS = 256
"""Maximum number of entries, far above any useful budget.

A crash loop must not fill the journal.
"""


class Restart(msgspec.Struct, omit_defaults=True):
    """One restart of the engine or its worker that an incident or a person requested.

    ``epoch`` is the epoch that the restart ended. An entry is written before the command is sent.
    """

    at: float
    epoch: str
    operation_id: str | None = None


class ReplicaRestarts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Restarts of one replica, as stored outside its journal.

    ``at`` are Unix seconds, oldest first. ``exhausted`` is the hard stop.
    """

    at: tuple[float, ...] = ()
    exhausted: bool = False

    def within(self, window_s: float, now: float) -> tuple[float, ...]:
        """Return the times of the restarts within the window that ends at ``now``."""
        return tuple(at for at in self.at if now - at < window_s)

    def merge(self, other: ReplicaRestarts) -> ReplicaRestarts:
        """Merge two counts of one replica. A restart in both counts is counted once."""
        at = tuple(sorted({*self.at, *other.at}))
        return ReplicaRestarts(at, self.exhausted or other.exhausted)


NO_RESTARTS = ReplicaRestarts()


def count_within(restarts: list[Restart], policy: RestartBudget, now: float) -> int:
    """Return the number of restarts in the window that ends at ``now``.

    A restart in the future counts, too: setting the clock back must not increase the budget.
    """
    return sum(1 for restart in restarts if now - restart.at < policy.window_s)


def count_remaining(restarts: list[Restart], policy: RestartBudget, now: float) -> int:
    """Return the number of restarts that are still allowed."""
    return max(0, policy.count - count_within(restarts, policy, now))


def record_restart(restarts: list[Restart], restart: Restart, policy: RestartBudget) -> None:
    """Add an entry, once for each ended epoch, and drop entries outside the window."""
    if any(known.epoch == restart.epoch for known in restarts):
        return
    restarts.append(restart)
    restarts[:] = [known for known in restarts if restart.at - known.at < policy.window_s][
        -MAX_RESTARTS:
    ]


def withdraw_restart(restarts: list[Restart], epoch: str) -> None:
    """Remove the entry of an epoch whose restart was refused before it started."""
    restarts[:] = [known for known in restarts if known.epoch != epoch]
