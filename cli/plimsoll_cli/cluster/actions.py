"""``plimsoll trim|drain|restart|resume POD``: asks, then has the pod's supervisor do it, fenced."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from plimsoll_cli.cluster.client import Cluster
from plimsoll_cli.cluster.exec import run
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_sidecar.ask import Answer

Ask = Callable[[str], bool]
"""Puts a question to a person."""

DOES = {
    "trim": "gives cached memory back to the system; caches are cold after it",
    "drain": "takes the replica out of service and lets running requests finish",
    "restart": "replaces its worker; running requests pause and go on",
    "resume": "puts it back into service and resets its restart budget",
}
SUPERVISOR = "supervisor"
STATUS_S = 30.0
ACT_S = 700.0
"""Longest action: a worker that loads its weights again."""


def act(cluster: Cluster, what: str, pod: str, yes: bool, deadline_s: float, ask: Ask) -> Answer:
    """Raises RunError where the supervisor cannot be asked, and where it says no."""
    seen = ask_supervisor(cluster, pod)
    if seen.epoch is None:
        raise RunError(f"{pod}: {seen.message}")
    if not yes:
        question = f"{what} {pod} (epoch {seen.epoch}, {seen.state}): {DOES[what]}. Go on?"
        if not sys.stdin.isatty():
            raise UsageError(f"{question}\nNobody is there to answer: add --yes")
        if not ask(question):
            raise RunError("nothing was done")
    fence = [f"--expected-epoch={seen.epoch}", f"--deadline={deadline_s}"]
    answer = _supervisor(cluster, pod, [what, *fence], ACT_S)
    if answer.outcome != "Succeeded":
        raise RunError(f"{what} {pod}: {answer.outcome}: {answer.message}")
    return answer


def ask_supervisor(cluster: Cluster, pod: str, namespace: str | None = None) -> Answer:
    """What the supervisor of a pod sees of its engine."""
    return _supervisor(cluster, pod, ["status"], STATUS_S, namespace)


def _supervisor(
    cluster: Cluster, pod: str, arguments: list[str], limit_s: float, namespace: str | None = None
) -> Answer:
    command = ["python", "-m", "plimsoll_sidecar.ask", *arguments]
    status, out, error = run(cluster, pod, SUPERVISOR, command, limit_s, namespace)
    try:
        return msgspec.json.decode(out.strip().splitlines()[-1], type=Answer)
    except (IndexError, msgspec.MsgspecError):
        said = error.strip() or out.strip() or f"exit status {status}"
        raise RunError(f"{pod}: the supervisor cannot be asked: {said}") from None
