"""Run actions on a replica: ask a person to confirm, then send the action to the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Callable

from plimsoll_api.action_answer import CURRENT_EPOCH, ActionAnswer
from plimsoll_api.admin import Capability
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.names import compute_action_limit_s
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import show_spinner

AskConfirmation = Callable[[str], bool]
CallSupervisor = Callable[[list[str], float], tuple[int, str, str]]
"""Function that runs the supervisor's ``ask`` program with arguments and a timeout in seconds.
It returns the exit status, the standard output and the standard error."""

ACTION_EFFECTS = {
    "trim": "frees the replica's cached memory, so that its caches are cold afterwards",
    "drain": "takes the replica out of service and lets its running requests finish",
    "restart": "restarts the engine's container; requests that do not finish in time are lost",
    "resume": "puts the replica back into service and resets its restart budget",
}
WORKER_RESTART_EFFECT = "replaces the engine's worker; running requests pause and then continue"
STATUS_TIMEOUT_S = 30.0
EXEC_START_MARGIN_S = 30.0
"""Time for starting the program in the pod, in addition to the timeout of the action."""


def run_action(
    call_supervisor: CallSupervisor,
    action: str,
    pod: str,
    skip_confirmation: bool,
    deadline_s: float,
    ask_confirmation: AskConfirmation,
    whole_service: bool = False,
) -> ActionAnswer:
    """Run an action through a replica's supervisor, and return the supervisor's answer.

    Unless ``skip_confirmation``, ask a person first; the supervisor refuses the action if the
    engine's epoch has changed since then. Raises RunError if the action is canceled or does not
    succeed, and UsageError if there is no terminal to ask for confirmation.
    """
    epoch = CURRENT_EPOCH
    if not skip_confirmation:
        current = get_status(call_supervisor, pod)
        if current.epoch is None:
            raise RunError(f"{pod}: {current.message}")
        epoch = current.epoch
        effect = describe_action_effect(action, current)
        question = f"Run {action} on pod {pod} (epoch {epoch}, {current.state})? This {effect}."
        if not sys.stdin.isatty():
            raise UsageError(
                f"{question}\nCannot ask for confirmation without a terminal: to confirm, add --yes"
            )
        if not ask_confirmation(question):
            raise RunError(f"{action} {pod}: canceled; nothing was changed")
    arguments = [action, f"--expected-epoch={epoch}", f"--deadline={deadline_s}"]
    arguments += ["--service"] if whole_service else []
    with show_spinner(f"{action} {pod}"):
        answer = _request_answer(
            call_supervisor,
            pod,
            arguments,
            compute_action_limit_s(deadline_s) + EXEC_START_MARGIN_S,
        )
    if answer.outcome != "Succeeded":
        raise RunError(f"{action} {pod}: {answer.outcome}: {answer.message}")
    return answer


def describe_action_effect(action: str, status: ActionAnswer) -> str:
    """Return the effect of the action on the replica, as the predicate of a sentence."""
    restarts_worker = action == "restart" and Capability.RESTART_WORKER.value in status.capabilities
    return WORKER_RESTART_EFFECT if restarts_worker else ACTION_EFFECTS[action]


def get_status(call_supervisor: CallSupervisor, pod: str) -> ActionAnswer:
    """Ask a replica's supervisor for the status, and return its answer. Raises RunError."""
    with show_spinner(f"asking {pod}"):
        return _request_answer(call_supervisor, pod, ["status"], STATUS_TIMEOUT_S)


def _request_answer(
    call_supervisor: CallSupervisor, pod: str, arguments: list[str], timeout_s: float
) -> ActionAnswer:
    code, out, error = call_supervisor(arguments, timeout_s)
    try:
        return decode(out.strip().splitlines()[-1].encode(), ActionAnswer)
    except (IndexError, MalformedError):
        detail = error.strip() or out.strip() or f"exit status {code}"
        raise RunError(f"pod {pod}: cannot call the supervisor: {detail}") from None
