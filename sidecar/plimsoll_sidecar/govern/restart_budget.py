"""The restart budget: at most so many restarts within a window, then none until a reset."""

from __future__ import annotations

import msgspec

from plimsoll_api.supervision import RestartBudget

KEPT = 256
"""Entries kept: far above any sensible count, so that a crash loop cannot fill the journal."""


class Restart(msgspec.Struct, omit_defaults=True):
    """One restart of the engine or its worker that a supervisor sent, also for a person.

    ``epoch`` is the epoch that it ended. An entry is written before the restart is sent.
    """

    at: float
    epoch: str
    operation_id: str | None = None


class ReplicaRestarts(msgspec.Struct, frozen=True, omit_defaults=True):
    """One replica's count as it is kept outside of its journal.

    Unix seconds of its restarts, oldest first, and whether the hard stop holds.
    """

    at: tuple[float, ...] = ()
    exhausted: bool = False

    def within(self, window_s: float, now: float) -> tuple[float, ...]:
        """Return the restarts that still count."""
        return tuple(at for at in self.at if now - at < window_s)

    def joined(self, other: ReplicaRestarts) -> ReplicaRestarts:
        """Merge two counts of one replica; a restart in both counts once."""
        at = tuple(sorted({*self.at, *other.at}))
        return ReplicaRestarts(at, self.exhausted or other.exhausted)


NONE = ReplicaRestarts()


def within(restarts: list[Restart], policy: RestartBudget, now: float) -> int:
    """How many restarts fall into the window that ends now.

    An entry from the future (the clock was set back) counts: the budget never grows by accident.
    """
    return sum(1 for restart in restarts if now - restart.at < policy.window_s)


def remaining(restarts: list[Restart], policy: RestartBudget, now: float) -> int:
    """Restarts that are still allowed."""
    return max(0, policy.count - within(restarts, policy, now))


def record(restarts: list[Restart], restart: Restart, policy: RestartBudget) -> None:
    """Add an entry, once for each epoch that ended, and forget those outside the window."""
    if any(known.epoch == restart.epoch for known in restarts):
        return
    restarts.append(restart)
    restarts[:] = [known for known in restarts if restart.at - known.at < policy.window_s][-KEPT:]


def withdraw(restarts: list[Restart], epoch: str) -> None:
    """Take back the entry of an epoch whose restart was refused before it began."""
    restarts[:] = [known for known in restarts if known.epoch != epoch]
