"""``plimsoll trim|drain|restart|resume``: asks, then has a replica's supervisor do it, fenced."""

from __future__ import annotations

import sys
from collections.abc import Callable

from plimsoll_api.action_answer import CURRENT, ActionAnswer
from plimsoll_api.admin import Capability
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.names import action_limit_s
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import waiting

Ask = Callable[[str], bool]
"""Puts a question to a person."""
Reach = Callable[[list[str], float], tuple[int, str, str]]
"""Runs the supervisor's ``ask`` program beside one replica's engine, with these arguments, for so
many seconds at most: exit status, standard output and error."""

DOES = {
    "trim": "returns cached memory to the system; caches are cold afterwards",
    "drain": "takes the replica out of service and lets running requests finish",
    "restart": "ends its engine, and its container starts again; requests that do not end in time"
    " are lost",
    "resume": "puts it back into service and resets its restart budget",
}
CARRIES = "replaces its worker; running requests pause, then continue"
"""What ``restart`` does to an engine that can restart its worker alone."""
STATUS_S = 30.0
EXEC_S = 30.0
"""Time to start the program in the pod, in addition to the limit of the action itself."""


def act(
    reach: Reach, what: str, pod: str, yes: bool, deadline_s: float, ask: Ask,
    whole_service: bool = False,
) -> ActionAnswer:  # fmt: skip
    """Have a supervisor carry out an action, fenced by the engine's epoch; return its answer.

    A person who confirms sees the replica first, and the action is fenced by the epoch that was
    shown. With ``yes``, a single call lets the supervisor fence it by the current epoch. Raises
    RunError if the supervisor does not answer, and if it refuses; UsageError without a terminal.
    """
    epoch = CURRENT
    if not yes:
        seen = status(reach, pod)
        if seen.epoch is None:
            raise RunError(f"{pod}: {seen.message}")
        epoch = seen.epoch
        question = f"{what} {pod} (epoch {epoch}, {seen.state}): {does(what, seen)}. Continue?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question}\nNo terminal to confirm on: add --yes")
        if not ask(question):
            raise RunError("canceled: nothing has changed")
    arguments = [what, f"--expected-epoch={epoch}", f"--deadline={deadline_s}"]
    arguments += ["--service"] if whole_service else []
    with waiting(f"{what} {pod}"):
        answer = _answer(reach, pod, arguments, action_limit_s(deadline_s) + EXEC_S)
    if answer.outcome != "Succeeded":
        raise RunError(f"{what} {pod}: {answer.outcome}: {answer.message}")
    return answer


def does(what: str, seen: ActionAnswer) -> str:
    """Say what the action does to the engine that was seen."""
    carries = what == "restart" and Capability.RESTART_WORKER.value in seen.capabilities
    return CARRIES if carries else DOES[what]


def status(reach: Reach, pod: str) -> ActionAnswer:
    """Ask the supervisor of a replica what it sees of its engine. Raises RunError."""
    with waiting(f"asking {pod}"):
        return _answer(reach, pod, ["status"], STATUS_S)


def _answer(reach: Reach, pod: str, arguments: list[str], limit_s: float) -> ActionAnswer:
    code, out, error = reach(arguments, limit_s)
    try:
        return decode(out.strip().splitlines()[-1].encode(), ActionAnswer)
    except (IndexError, Malformed):
        said = error.strip() or out.strip() or f"exit status {code}"
        raise RunError(f"{pod}: cannot reach the supervisor: {said}") from None
