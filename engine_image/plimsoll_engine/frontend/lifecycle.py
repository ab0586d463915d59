"""The engine's state machine: which state may follow which, and who is let in."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_api.admin import EngineState as S

FOLLOWS: dict[S, frozenset[S]] = {
    S.STARTING: frozenset({S.WARMING, S.STOPPING, S.FAILED}),
    S.WARMING: frozenset({S.SERVING, S.STOPPING, S.FAILED}),
    S.SERVING: frozenset({S.DRAINING, S.RESTARTING, S.STOPPING, S.FAILED}),
    S.DRAINING: frozenset({S.DRAINED, S.SERVING, S.RESTARTING, S.STOPPING, S.FAILED}),
    S.DRAINED: frozenset({S.SERVING, S.RESTARTING, S.STOPPING, S.FAILED}),
    S.RESTARTING: frozenset({S.SERVING, S.STOPPING, S.FAILED}),
    S.STOPPING: frozenset({S.STOPPED, S.FAILED}),
    S.STOPPED: frozenset(),
    S.FAILED: frozenset(),
}
ADMITS = frozenset({S.WARMING, S.SERVING, S.RESTARTING})
WARMING = frozenset({S.STARTING, S.WARMING})
READY = frozenset({S.SERVING, S.RESTARTING})


class IllegalTransition(Exception):
    """A state that cannot follow the present one."""


class Lifecycle:
    """Where the engine stands. A restart of the worker ends in ``serving``, also after a drain."""

    def __init__(self, on_change: Callable[[S, S], None] = lambda before, after: None) -> None:
        self.state = S.STARTING
        self._on_change = on_change

    def move(self, state: S) -> None:
        """Enter ``state``; the same state again does nothing."""
        before = self.state
        if state is before:
            return
        if state not in FOLLOWS[before]:
            raise IllegalTransition(f"an engine in state {before} cannot change to {state}")
        self.state = state
        self._on_change(before, state)

    def may(self, state: S) -> bool:
        """Whether ``state`` can follow the present one."""
        return state in FOLLOWS[self.state]

    @property
    def admits(self) -> bool:
        """New requests are taken in."""
        return self.state in ADMITS

    @property
    def ready(self) -> bool:
        """The service may route here. A worker restart does not take the replica out."""
        return self.state in READY

    @property
    def warming(self) -> bool:
        """No worker has served yet: a request would wait for the whole start."""
        return self.state in WARMING

    @property
    def ended(self) -> bool:
        """Whether no state can follow."""
        return not FOLLOWS[self.state]
