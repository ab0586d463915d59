"""Actions on pods: by exec in the supervisor's container, on one pod or on all of an object."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import yaml
from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_api.names import ASK_MODULE, SUPERVISOR_CONTAINER
from plimsoll_cli.actions import Ask, Reach, act, status
from plimsoll_cli.cluster.client import AbsentError, Cluster, Object, denied
from plimsoll_cli.cluster.supervised import CORE, pods_of
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import waiting
from plimsoll_cli.targets import Target

BACK_S = 900.0
"""A large model may load its weights for minutes."""
POLL_S = 2.0
HANDSHAKE = re.compile(r"Handshake status (\d{3})\b")
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
    """Do ``what`` to each supervised pod of ``target``; call ``tell`` with each answer.

    After a restart, the pod must be ready again before the next one's turn. Raises RunError if a
    pod fails: the pods after it stay as they are.
    """
    if what == "drain":
        raise UsageError(
            f"drain {target}: name one pod: if all pods were drained, none would be left to serve"
        )
    pods = pods_of(cluster, target)
    for at, pod in enumerate(pods):
        try:
            answer = act(
                in_supervisor(cluster, pod), what, pod, yes, deadline_s, ask, whole_service
            )
            tell(pod, answer)
            if what == "restart" and at + 1 < len(pods):
                _wait(cluster, pod, answer.epoch)
        except RunError as error:
            left = ", ".join(pods[at + 1 :])
            raise RunError(f"{error}" + (f"; not touched: {left}" if left else "")) from None


def _wait(cluster: Cluster, pod: str, epoch: str | None) -> None:
    """Wait until ``pod`` is ready with an engine in another epoch."""
    end = time.monotonic() + BACK_S
    with waiting(f"waiting until {pod} is ready again"):
        while not (_ready(cluster, pod) and _epoch(cluster, pod) not in (None, epoch)):
            if time.monotonic() >= end:
                raise RunError(f"{pod}: not ready within {BACK_S / 60:.0f} min after the restart")
            time.sleep(POLL_S)


def _ready(cluster: Cluster, pod: str) -> bool:
    try:
        return is_ready(cluster.get(_path(cluster, pod)))
    except AbsentError:
        raise RunError(f"{pod}: the pod is gone: its workload replaces it") from None


def _epoch(cluster: Cluster, pod: str) -> str | None:
    """Return the engine's epoch; None while the engine does not answer."""
    try:
        return status(in_supervisor(cluster, pod), pod).epoch
    except RunError:
        return None


def check_not_last(cluster: Cluster, pod: str) -> None:
    """Raise RunError if ``pod`` is the last ready pod of a Service, or if that is unknown."""
    try:
        last = _last_of(cluster, pod)
    except AbsentError:
        return  # the action itself says that there is no such pod
    except RunError as error:
        raise RunError(
            f"drain {pod}: cannot tell whether another pod is ready, so nothing has changed;"
            f" --force drains it all the same: {error}"
        ) from None
    if last is not None:
        raise RunError(
            f"drain {pod}: it is the last ready pod of Service {last}, and nothing would serve;"
            " --force drains it all the same"
        )


def _last_of(cluster: Cluster, pod: str) -> str | None:
    """Return a Service whose last ready pod is ``pod``."""
    found, namespace = cluster.get(_path(cluster, pod)), cluster.namespace or "default"
    if not is_ready(found):
        return None
    labels = (found["metadata"].get("labels") or {}).items()
    for service in cluster.listed(CORE, "services", namespace):
        selector = ((service.get("spec") or {}).get("selector") or {}).items()
        if not selector or not selector <= labels:
            continue
        query = ",".join(f"{key}={value}" for key, value in selector)
        others = cluster.listed(CORE, "pods", namespace, labelSelector=query)
        if not any(is_ready(one) for one in others if one["metadata"]["name"] != pod):
            return str(service["metadata"]["name"])
    return None


def is_ready(pod: Object) -> bool:
    """Return whether the pod's condition Ready is true, and the pod is not being deleted."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def _path(cluster: Cluster, pod: str) -> str:
    return f"{CORE}/namespaces/{cluster.namespace or 'default'}/pods/{pod}"


def in_supervisor(cluster: Cluster, pod: str, namespace: str | None = None) -> Reach:
    """Return a function that runs the supervisor's ``ask`` program in its container of ``pod``."""

    def reach(arguments: list[str], limit_s: float) -> tuple[int, str, str]:
        command = ["python", "-m", ASK_MODULE, *arguments]
        return run(cluster, pod, SUPERVISOR_CONTAINER, command, limit_s, namespace)

    return reach


def run(
    cluster: Cluster,
    pod: str,
    container: str,
    command: list[str],
    limit_s: float,
    namespace: str | None = None,
) -> tuple[int, str, str]:
    """Exit status, standard output and error. Raises RunError where it could not be run."""
    namespace = namespace or cluster.namespace or "default"
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
    # ``stream`` replaces a method of its client, so it gets a client of its own.
    core = k8s.CoreV1Api(k8s.ApiClient(cluster.configuration))
    try:
        channel = stream(
            core.connect_get_namespaced_pod_exec, pod, namespace, container=container,
            command=command, stdout=True, stderr=True, stdin=False, tty=False,
            _preload_content=False,
        )  # fmt: skip
        channel.run_forever(timeout=limit_s)
        out, error = channel.read_stdout(), channel.read_stderr()
        if channel.is_open():
            channel.close()
            raise RunError(f"{pod}: no answer within {limit_s:.0f} s")
        status = channel.returncode
    except ApiException as failure:
        raise RunError(explained(failure, path, pod, container, cluster.host)) from None
    except (OSError, yaml.YAMLError) as failure:
        raise RunError(f"{pod}: exec: {failure}") from None
    return status if status is not None else 1, out, error


def explained(failure: ApiException, path: str, pod: str, container: str, host: str) -> str:
    """Return the message for a command that could not be run."""
    text = str(failure.reason or failure.body or failure)
    # For a refused upgrade, the client has no status, only a text with headers and their numbers.
    refused = HANDSHAKE.match(text)
    status = int(refused[1]) if refused else failure.status
    if status == 403:
        return denied("POST", path)
    if status == 404:
        return (
            f"there is no pod {pod} in the namespace: check the name and -n; for all supervised"
            " pods of a workload, write for example deployment/vllm"
        )
    if f"container {container} is not valid" in text:
        return (
            f"pod {pod} has no container {container}: add one with a SupervisionPolicy or with"
            " plimsoll inject, and recreate the pod"
        )
    return f"exec in {pod} by {host}: {text.strip()}"
