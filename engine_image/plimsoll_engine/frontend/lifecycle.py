"""State machine of the engine."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_api.admin import EngineState as S

TRANSITIONS: dict[S, frozenset[S]] = {
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
ADMITTING_STATES = frozenset({S.WARMING, S.SERVING, S.RESTARTING})
WARMING_STATES = frozenset({S.STARTING, S.WARMING})
READY_STATES = frozenset({S.SERVING, S.RESTARTING})


class IllegalTransitionError(Exception):
    """The engine cannot change from its current state to the new state."""


class Lifecycle:
    """Current state of the engine.

    ``on_change`` receives the old and the new state of each change.
    """

    def __init__(self, on_change: Callable[[S, S], None] = lambda before, after: None) -> None:
        self.state = S.STARTING
        self._on_change = on_change

    def move_to(self, state: S) -> None:
        """Change to ``state``, unless it is the current state. Raises IllegalTransitionError."""
        before = self.state
        if state is before:
            return
        if state not in TRANSITIONS[before]:
            raise IllegalTransitionError(f"the engine cannot change from state {before} to {state}")
        self.state = state
        self._on_change(before, state)

    def can_move_to(self, state: S) -> bool:
        """Report whether ``state`` may follow the current state."""
        return state in TRANSITIONS[self.state]

    @property
    def is_admitting(self) -> bool:
        """Whether new requests are accepted."""
        return self.state in ADMITTING_STATES

    @property
    def is_ready(self) -> bool:
        """Whether this replica may get requests. True while its worker restarts."""
        return self.state in READY_STATES

    @property
    def is_warming(self) -> bool:
        """Whether the first worker is still starting."""
        return self.state in WARMING_STATES

    @property
    def has_ended(self) -> bool:
        """Whether the current state is final."""
        return not TRANSITIONS[self.state]
