"""Run actions on pods, through exec in the supervisor's container."""

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
from plimsoll_cli.actions import AskConfirmation, CallSupervisor, get_status, run_action
from plimsoll_cli.cluster.client import Cluster, NotFoundError, Object, format_denied_message
from plimsoll_cli.cluster.supervised import CORE_API_PATH, list_target_pods
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import show_spinner
from plimsoll_cli.targets import Target

READY_TIMEOUT_S = 900.0
"""Maximum time until a restarted pod is ready; large models load for minutes."""
POLL_PERIOD_S = 2.0
HANDSHAKE_STATUS_PATTERN = re.compile(r"Handshake status (\d{3})\b")
PrintAnswer = Callable[[str, ActionAnswer], None]


def run_action_on_pods(
    cluster: Cluster,
    action: str,
    target: Target,
    skip_confirmation: bool,
    deadline_s: float,
    ask_confirmation: AskConfirmation,
    whole_service: bool,
    print_answer: PrintAnswer,
) -> None:
    """Run ``action`` on each supervised pod of ``target``, and print each answer.

    The action changes one pod after the other, and stops at the first failure. Raises RunError,
    which names the unchanged pods, and UsageError for the action ``drain``.
    """
    if action == "drain":
        raise UsageError(
            f"drain {target}: draining all its pods would leave no ready pod; name a single pod"
            " instead"
        )
    pods = list_target_pods(cluster, target)
    for at, pod in enumerate(pods):
        try:
            answer = run_action(
                make_supervisor_caller(cluster, pod),
                action,
                pod,
                skip_confirmation,
                deadline_s,
                ask_confirmation,
                whole_service,
            )
            print_answer(pod, answer)
            if action == "restart" and at + 1 < len(pods):
                _wait_until_restarted(cluster, pod, answer.epoch)
        except RunError as error:
            untouched = ", ".join(pods[at + 1 :])
            raise RunError(
                f"{error}" + (f"; these pods were not changed: {untouched}" if untouched else "")
            ) from None


def _wait_until_restarted(cluster: Cluster, pod: str, epoch: str | None) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    with show_spinner(f"waiting until pod {pod} is ready again"):
        while not (_is_pod_ready(cluster, pod) and _read_epoch(cluster, pod) not in (None, epoch)):
            if time.monotonic() >= end:
                raise RunError(
                    f"pod {pod} did not become ready within {READY_TIMEOUT_S / 60:.0f} min of its"
                    f" restart; to find out why, run: kubectl describe pod {pod}"
                )
            time.sleep(POLL_PERIOD_S)


def _is_pod_ready(cluster: Cluster, pod: str) -> bool:
    try:
        return is_ready(cluster.get(_make_pod_path(cluster, pod)))
    except NotFoundError:
        raise RunError(f"pod {pod} was deleted; its workload creates a replacement") from None


# None if the engine does not answer.
def _read_epoch(cluster: Cluster, pod: str) -> str | None:
    try:
        return get_status(make_supervisor_caller(cluster, pod), pod).epoch
    except RunError:
        return None


def refuse_last_ready_pod(cluster: Cluster, pod: str) -> None:
    """Raise RunError if ``pod`` is, or may be, the last ready pod of a Service."""
    try:
        last = _find_service_with_last_ready_pod(cluster, pod)
    except NotFoundError:
        return  # the action itself reports a missing pod
    except RunError as error:
        raise RunError(
            f"drain {pod}: cannot determine whether another pod is ready: {error}; nothing was"
            " changed. To drain the pod anyway, add --force"
        ) from None
    if last is not None:
        raise RunError(
            f"drain {pod}: the pod is the last ready pod of Service {last}; to drain it anyway,"
            " add --force"
        )


def _find_service_with_last_ready_pod(cluster: Cluster, pod: str) -> str | None:
    found, namespace = cluster.get(_make_pod_path(cluster, pod)), cluster.namespace or "default"
    if not is_ready(found):
        return None
    labels = (found["metadata"].get("labels") or {}).items()
    for service in cluster.list_objects(CORE_API_PATH, "services", namespace):
        selector = ((service.get("spec") or {}).get("selector") or {}).items()
        if not selector or not selector <= labels:
            continue
        query = ",".join(f"{key}={value}" for key, value in selector)
        others = cluster.list_objects(CORE_API_PATH, "pods", namespace, labelSelector=query)
        if not any(is_ready(one) for one in others if one["metadata"]["name"] != pod):
            return str(service["metadata"]["name"])
    return None


def is_ready(pod: Object) -> bool:
    """Report whether the pod is ready and not being deleted."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def _make_pod_path(cluster: Cluster, pod: str) -> str:
    return f"{CORE_API_PATH}/namespaces/{cluster.namespace or 'default'}/pods/{pod}"


def make_supervisor_caller(
    cluster: Cluster, pod: str, namespace: str | None = None
) -> CallSupervisor:
    """Return a function that runs the supervisor's ``ask`` program in ``pod``."""

    def run_ask(arguments: list[str], timeout_s: float) -> tuple[int, str, str]:
        command = ["python", "-m", ASK_MODULE, *arguments]
        return run_in_container(cluster, pod, SUPERVISOR_CONTAINER, command, timeout_s, namespace)

    return run_ask


def run_in_container(
    cluster: Cluster,
    pod: str,
    container: str,
    command: list[str],
    timeout_s: float,
    namespace: str | None = None,
) -> tuple[int, str, str]:
    """Run a command in a container, and return exit status, standard output and standard error.

    Raises RunError if the command cannot run, or does not end within ``timeout_s`` seconds.
    """
    namespace = namespace or cluster.namespace or "default"
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
    # ``stream`` replaces a method of its client, so use a separate client.
    core = k8s.CoreV1Api(k8s.ApiClient(cluster.configuration))
    try:
        channel = stream(
            core.connect_get_namespaced_pod_exec, pod, namespace, container=container,
            command=command, stdout=True, stderr=True, stdin=False, tty=False,
            _preload_content=False,
        )  # fmt: skip
        channel.run_forever(timeout=timeout_s)
        out, error = channel.read_stdout(), channel.read_stderr()
        if channel.is_open():
            channel.close()
            raise RunError(
                f"pod {pod}: the command in container {container} did not finish within"
                f" {timeout_s:.0f} s"
            )
        status = channel.returncode
    except ApiException as failure:
        raise RunError(format_exec_error(failure, path, pod, container, cluster.host)) from None
    except (OSError, yaml.YAMLError) as failure:
        raise RunError(
            f"pod {pod}: cannot run a command in container {container}: {failure}"
        ) from None
    return status if status is not None else 1, out, error


def format_exec_error(failure: ApiException, path: str, pod: str, container: str, host: str) -> str:
    """Return the error message for an exec request that failed."""
    text = str(failure.reason or failure.body or failure)
    # After a refused upgrade, status and headers are only in the text of the exception.
    refused = HANDSHAKE_STATUS_PATTERN.match(text)
    status = int(refused[1]) if refused else failure.status
    if status == 403:
        return format_denied_message("POST", path)
    if status == 404:
        return (
            f"pod {pod} does not exist in the namespace: check the name and -n. To select all"
            " supervised pods of a workload, write KIND/NAME, for example deployment/vllm"
        )
    if f"container {container} is not valid" in text:
        return (
            f"pod {pod} has no container {container}: add a supervisor with a SupervisionPolicy "
            "or plimsoll inject, and recreate the pod"
        )
    return f"cannot run a command in pod {pod} through {host}: {text.strip()}"
