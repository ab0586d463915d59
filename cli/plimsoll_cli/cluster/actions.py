"""Actions on pods, through exec in the supervisor's container."""

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
from plimsoll_cli.actions import CallSupervisor, Confirm, act, status
from plimsoll_cli.cluster.client import AbsentError, Cluster, Object, denied_message
from plimsoll_cli.cluster.supervised import CORE, list_target_pods
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import spinner
from plimsoll_cli.targets import Target

READY_TIMEOUT_S = 900.0
"""Large models load their weights for minutes."""
POLL_S = 2.0
HANDSHAKE = re.compile(r"Handshake status (\d{3})\b")
OnAnswer = Callable[[str, ActionAnswer], None]


def act_on_all(
    cluster: Cluster,
    action: str,
    target: Target,
    yes: bool,
    deadline_s: float,
    confirm: Confirm,
    whole_service: bool,
    on_answer: OnAnswer,
) -> None:
    """Run ``action`` on each supervised pod of ``target``, and call ``on_answer`` with each answer.

    After a restart, a pod must be ready again before the next one restarts. Raises RunError if a
    pod fails; the following pods stay as they are.
    """
    if action == "drain":
        raise UsageError(
            f"drain {target}: name one pod, because a service needs at least one ready pod"
        )
    pods = list_target_pods(cluster, target)
    for at, pod in enumerate(pods):
        try:
            answer = act(
                supervisor_caller(cluster, pod),
                action,
                pod,
                yes,
                deadline_s,
                confirm,
                whole_service,
            )
            on_answer(pod, answer)
            if action == "restart" and at + 1 < len(pods):
                _wait(cluster, pod, answer.epoch)
        except RunError as error:
            untouched = ", ".join(pods[at + 1 :])
            raise RunError(
                f"{error}" + (f"; not touched: {untouched}" if untouched else "")
            ) from None


def _wait(cluster: Cluster, pod: str, epoch: str | None) -> None:
    """Wait until ``pod`` is ready again and its engine has another epoch. Raises RunError."""
    end = time.monotonic() + READY_TIMEOUT_S
    with spinner(f"waiting until {pod} is ready again"):
        while not (_ready(cluster, pod) and _epoch(cluster, pod) not in (None, epoch)):
            if time.monotonic() >= end:
                raise RunError(
                    f"{pod}: not ready within {READY_TIMEOUT_S / 60:.0f} min after the restart"
                )
            time.sleep(POLL_S)


def _ready(cluster: Cluster, pod: str) -> bool:
    try:
        return is_ready(cluster.get(_path(cluster, pod)))
    except AbsentError:
        raise RunError(f"{pod}: the pod was deleted; its workload replaces it") from None


def _epoch(cluster: Cluster, pod: str) -> str | None:
    """Return the engine's epoch, or None if the engine does not answer."""
    try:
        return status(supervisor_caller(cluster, pod), pod).epoch
    except RunError:
        return None


def check_not_last(cluster: Cluster, pod: str) -> None:
    """Raise RunError if ``pod`` is the last ready pod of a Service, or if this is unknown."""
    try:
        last = _service_without_pod(cluster, pod)
    except AbsentError:
        return  # the action reports the missing pod
    except RunError as error:
        raise RunError(
            f"drain {pod}: cannot check whether another pod is ready, so nothing has changed;"
            f" use --force to drain it anyway: {error}"
        ) from None
    if last is not None:
        raise RunError(
            f"drain {pod}: it is the last ready pod of Service {last};"
            " use --force to drain it anyway"
        )


def _service_without_pod(cluster: Cluster, pod: str) -> str | None:
    """Return the name of a Service whose last ready pod is ``pod``, or None."""
    found, namespace = cluster.get(_path(cluster, pod)), cluster.namespace or "default"
    if not is_ready(found):
        return None
    labels = (found["metadata"].get("labels") or {}).items()
    for service in cluster.list_objects(CORE, "services", namespace):
        selector = ((service.get("spec") or {}).get("selector") or {}).items()
        if not selector or not selector <= labels:
            continue
        query = ",".join(f"{key}={value}" for key, value in selector)
        others = cluster.list_objects(CORE, "pods", namespace, labelSelector=query)
        if not any(is_ready(one) for one in others if one["metadata"]["name"] != pod):
            return str(service["metadata"]["name"])
    return None


def is_ready(pod: Object) -> bool:
    """Return whether the pod is ready and not being deleted."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def _path(cluster: Cluster, pod: str) -> str:
    return f"{CORE}/namespaces/{cluster.namespace or 'default'}/pods/{pod}"


def supervisor_caller(cluster: Cluster, pod: str, namespace: str | None = None) -> CallSupervisor:
    """Return a function that runs the supervisor's ``ask`` program in ``pod``."""

    def call(arguments: list[str], limit_s: float) -> tuple[int, str, str]:
        command = ["python", "-m", ASK_MODULE, *arguments]
        return run(cluster, pod, SUPERVISOR_CONTAINER, command, limit_s, namespace)

    return call


def run(
    cluster: Cluster,
    pod: str,
    container: str,
    command: list[str],
    limit_s: float,
    namespace: str | None = None,
) -> tuple[int, str, str]:
    """Run a command in a container; return exit status, standard output and standard error.

    Raises RunError if the command could not be run.
    """
    namespace = namespace or cluster.namespace or "default"
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
    # ``stream`` patches a method of its client, so use a separate client.
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
        raise RunError(exec_error_message(failure, path, pod, container, cluster.host)) from None
    except (OSError, yaml.YAMLError) as failure:
        raise RunError(f"{pod}: exec: {failure}") from None
    return status if status is not None else 1, out, error


def exec_error_message(
    failure: ApiException, path: str, pod: str, container: str, host: str
) -> str:
    """Return the error message for a command that could not be run."""
    text = str(failure.reason or failure.body or failure)
    # For a refused upgrade, the client has no status, only a text with the status and headers.
    refused = HANDSHAKE.match(text)
    status = int(refused[1]) if refused else failure.status
    if status == 403:
        return denied_message("POST", path)
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
