"""``plimsoll trim|drain|restart|resume POD``: asks, then has the replica's supervisor do it,
fenced."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import waiting
from plimsoll_sidecar.ask import Answer

Ask = Callable[[str], bool]
"""Puts a question to a person."""
Reach = Callable[[list[str], float], tuple[int, str, str]]
"""Runs ``plimsoll_sidecar.ask`` beside one replica's engine, with these arguments and for so many
seconds at most: exit status, standard output and error."""

DOES = {
    "trim": "gives cached memory back to the system; caches are cold after it",
    "drain": "takes the replica out of service and lets running requests finish",
    "restart": "replaces its worker; running requests pause and go on",
    "resume": "puts it back into service and resets its restart budget",
}
STATUS_S = 30.0
ACT_S = 700.0
"""Longest action: a worker that loads its weights again."""


def act(reach: Reach, what: str, pod: str, yes: bool, deadline_s: float, ask: Ask) -> Answer:
    """Raises RunError where the supervisor cannot be asked, and where it says no."""
    seen = status(reach, pod)
    if seen.epoch is None:
        raise RunError(f"{pod}: {seen.message}")
    if not yes:
        question = f"{what} {pod} (epoch {seen.epoch}, {seen.state}): {DOES[what]}. Go on?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question}\nNobody is there to answer: add --yes")
        if not ask(question):
            raise RunError("nothing was done")
    fence = [f"--expected-epoch={seen.epoch}", f"--deadline={deadline_s}"]
    with waiting(f"{what} {pod}"):
        answer = _answer(reach, pod, [what, *fence], ACT_S)
    if answer.outcome != "Succeeded":
        raise RunError(f"{what} {pod}: {answer.outcome}: {answer.message}")
    return answer


def status(reach: Reach, pod: str) -> Answer:
    """What the supervisor of a replica sees of its engine."""
    with waiting(f"asking {pod}"):
        return _answer(reach, pod, ["status"], STATUS_S)


def _answer(reach: Reach, pod: str, arguments: list[str], limit_s: float) -> Answer:
    code, out, error = reach(arguments, limit_s)
    try:
        return msgspec.json.decode(out.strip().splitlines()[-1], type=Answer)
    except (IndexError, msgspec.MsgspecError):
        said = error.strip() or out.strip() or f"exit status {code}"
        raise RunError(f"{pod}: the supervisor cannot be asked: {said}") from None
