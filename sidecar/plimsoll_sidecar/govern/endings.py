"""What an ending means for the next incident of its kind."""

from __future__ import annotations

from plimsoll_sidecar.govern import ladder
from plimsoll_sidecar.govern.incident import Incident, Phase, Reason
from plimsoll_sidecar.govern.state import BACK_OFF_MAX_S, BACK_OFF_S, GovernorState, Quiet

UNTIL_CHANGE = (Reason.OBSERVED, Reason.EFFECT_UNKNOWN)


def quiet_after(state: GovernorState, incident: Incident, now: float) -> None:
    """Keeps the same trouble from opening again at once where nothing more can be done now."""
    kind = incident.kind
    if incident.reason is Reason.CLEARED:
        return  # a suspicion that went away proves nothing about what was tried before
    if incident.phase is Phase.RESOLVED:
        state.failures.pop(kind, None)
    elif incident.reason in UNTIL_CHANGE or kind not in ladder.CURABLE:
        state.quiet[kind] = Quiet(while_suspected=True, epoch=state.epoch)
    elif incident.reason is Reason.RESTART_BUDGET_EXHAUSTED:
        state.quiet[kind] = Quiet()
    else:
        failures = state.failures[kind] = state.failures.get(kind, 0) + 1
        pause = min(BACK_OFF_S * 2.0 ** (failures - 1), BACK_OFF_MAX_S)
        state.quiet[kind] = Quiet(until=now + pause)
