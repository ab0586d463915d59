"""Actions on a replica: confirmation by a person, then a fenced call to its supervisor."""

from __future__ import annotations

import sys
from collections.abc import Callable

from plimsoll_api.action_answer import CURRENT, ActionAnswer
from plimsoll_api.admin import Capability
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.names import action_limit_s
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import spinner

Confirm = Callable[[str], bool]
"""Function that asks a person a question and returns whether the answer is yes."""
CallSupervisor = Callable[[list[str], float], tuple[int, str, str]]
"""Function that runs the supervisor's ``ask`` program in a replica, with arguments and a timeout in
seconds. Returns exit status, standard output and standard error."""

EFFECTS = {
    "trim": "returns cached memory to the system; caches are cold afterwards",
    "drain": "takes the replica out of service and lets running requests finish",
    "restart": "ends its engine, and its container starts again; requests that do not end in time"
    " are lost",
    "resume": "puts it back into service and resets its restart budget",
}
WORKER_RESTART_EFFECT = "replaces its worker; running requests pause, then continue"
"""Effect of ``restart`` on an engine that can restart only its worker."""
STATUS_S = 30.0
EXEC_S = 30.0
"""Time to start the program in the pod, added to the timeout of the action."""


def act(
    call: CallSupervisor, action: str, pod: str, yes: bool, deadline_s: float, confirm: Confirm,
    whole_service: bool = False,
) -> ActionAnswer:  # fmt: skip
    """Run an action through a replica's supervisor and return its answer.

    A person first sees the replica and confirms; the action is then fenced by the epoch that was
    shown. With ``yes``, the supervisor uses the current epoch. Raises RunError if the supervisor
    refuses or does not answer, and UsageError without a terminal.
    """
    epoch = CURRENT
    if not yes:
        current = status(call, pod)
        if current.epoch is None:
            raise RunError(f"{pod}: {current.message}")
        epoch = current.epoch
        effect = describe_effect(action, current)
        question = f"{action} {pod} (epoch {epoch}, {current.state}): {effect}. Continue?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question}\nThere is no terminal to confirm on: add --yes")
        if not confirm(question):
            raise RunError("canceled: nothing has changed")
    arguments = [action, f"--expected-epoch={epoch}", f"--deadline={deadline_s}"]
    arguments += ["--service"] if whole_service else []
    with spinner(f"{action} {pod}"):
        answer = _answer(call, pod, arguments, action_limit_s(deadline_s) + EXEC_S)
    if answer.outcome != "Succeeded":
        raise RunError(f"{action} {pod}: {answer.outcome}: {answer.message}")
    return answer


def describe_effect(action: str, current: ActionAnswer) -> str:
    """Return the effect of the action on the engine."""
    restarts_worker = (
        action == "restart" and Capability.RESTART_WORKER.value in current.capabilities
    )
    return WORKER_RESTART_EFFECT if restarts_worker else EFFECTS[action]


def status(call: CallSupervisor, pod: str) -> ActionAnswer:
    """Return the supervisor's view of its engine. Raises RunError."""
    with spinner(f"asking {pod}"):
        return _answer(call, pod, ["status"], STATUS_S)


def _answer(call: CallSupervisor, pod: str, arguments: list[str], limit_s: float) -> ActionAnswer:
    code, out, error = call(arguments, limit_s)
    try:
        return decode(out.strip().splitlines()[-1].encode(), ActionAnswer)
    except (IndexError, Malformed):
        detail = error.strip() or out.strip() or f"exit status {code}"
        raise RunError(f"{pod}: cannot call the supervisor: {detail}") from None
