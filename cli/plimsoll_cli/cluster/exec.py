"""Runs a command in a container, as ``kubectl exec`` does."""

from __future__ import annotations

import re

import yaml
from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream

from plimsoll_api.names import ASK_MODULE, SUPERVISOR_CONTAINER
from plimsoll_cli.actions import Reach
from plimsoll_cli.cluster.client import Cluster, denied
from plimsoll_cli.errors import RunError

HANDSHAKE = re.compile(r"Handshake status (\d{3})\b")


def beside(cluster: Cluster, pod: str, namespace: str | None = None) -> Reach:
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
    # The stream replaces a method of its client: it gets one of its own.
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
    """Return what a person reads of a command that could not be run."""
    text = str(failure.reason or failure.body or failure)
    # The client gives a refused upgrade no status, and a text with headers, whose numbers are many.
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
