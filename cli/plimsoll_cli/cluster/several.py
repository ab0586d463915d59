"""One action on all supervised pods of an object, one pod after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_cli.actions import Ask, act, status
from plimsoll_cli.cluster.client import AbsentError, Cluster
from plimsoll_cli.cluster.exec import beside
from plimsoll_cli.cluster.supervised import CORE, pods_of
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import waiting
from plimsoll_cli.targets import Target

BACK_S = 900.0
"""A large model may load its weights for minutes."""
POLL_S = 2.0
Tell = Callable[[str, ActionAnswer], None]


def act_on_all(
    cluster: Cluster,
    what: str,
    target: Target,
    yes: bool,
    deadline_s: float,
    ask: Ask,
    whole_service: bool,
    tell: Tell,
) -> None:
    """Do ``what`` to each supervised pod of ``target``; ``tell`` hears each answer.

    After a restart the pod must be ready again before the next one is touched. RunError where a
    pod fails: the pods after it stay as they are.
    """
    if what == "drain":
        raise UsageError(
            f"drain {target}: name one pod: a drain of all pods would leave nothing to serve"
        )
    pods = pods_of(cluster, target)
    for at, pod in enumerate(pods):
        try:
            answer = act(beside(cluster, pod), what, pod, yes, deadline_s, ask, whole_service)
            tell(pod, answer)
            if what == "restart" and at + 1 < len(pods):
                _wait(cluster, pod, answer.epoch)
        except RunError as error:
            left = ", ".join(pods[at + 1 :])
            raise RunError(f"{error}" + (f"; not touched: {left}" if left else "")) from None


def _wait(cluster: Cluster, pod: str, epoch: str | None) -> None:
    """Until ``pod`` is ready with an engine in another epoch."""
    end = time.monotonic() + BACK_S
    with waiting(f"waiting until {pod} is ready again"):
        while not (_ready(cluster, pod) and _epoch(cluster, pod) not in (None, epoch)):
            if time.monotonic() >= end:
                raise RunError(f"{pod}: not ready within {BACK_S / 60:.0f} min after the restart")
            time.sleep(POLL_S)


def _ready(cluster: Cluster, pod: str) -> bool:
    path = f"{CORE}/namespaces/{cluster.namespace or 'default'}/pods/{pod}"
    try:
        found = cluster.get(path)
    except AbsentError:
        raise RunError(f"{pod}: the pod is gone: its workload replaces it") from None
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def _epoch(cluster: Cluster, pod: str) -> str | None:
    """None while the engine does not answer."""
    try:
        return status(beside(cluster, pod), pod).epoch
    except RunError:
        return None
