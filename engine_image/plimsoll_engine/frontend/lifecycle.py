"""State machine of the engine: allowed transitions, and what each state admits."""

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
ADMITS = frozenset({S.WARMING, S.SERVING, S.RESTARTING})
WARMING = frozenset({S.STARTING, S.WARMING})
READY = frozenset({S.SERVING, S.RESTARTING})


class IllegalTransition(Exception):
    """The new state cannot follow the current one."""


class Lifecycle:
    """Current state of the engine. A worker restart ends in ``serving``, even after a drain."""

    def __init__(self, on_change: Callable[[S, S], None] = lambda before, after: None) -> None:
        self.state = S.STARTING
        self._on_change = on_change

    def move(self, state: S) -> None:
        """Enter ``state``, or raise :class:`IllegalTransition`.

        No effect if it is the current state.
        """
        before = self.state
        if state is before:
            return
        if state not in TRANSITIONS[before]:
            raise IllegalTransition(f"an engine in state {before} cannot change to {state}")
        self.state = state
        self._on_change(before, state)

    def can_move_to(self, state: S) -> bool:
        """Report whether ``state`` can follow the current one."""
        return state in TRANSITIONS[self.state]

    @property
    def is_admitting(self) -> bool:
        """Whether new requests are accepted."""
        return self.state in ADMITS

    @property
    def is_ready(self) -> bool:
        """Whether the Service may route here.

        A worker restart does not make the replica unready.
        """
        return self.state in READY

    @property
    def is_warming(self) -> bool:
        """Whether the first worker is still starting: a request would wait until it serves."""
        return self.state in WARMING

    @property
    def has_ended(self) -> bool:
        """Whether the current state is final."""
        return not TRANSITIONS[self.state]
