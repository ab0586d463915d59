"""Why a command could not be run in a container, by what the API server answered."""

from __future__ import annotations

import re

import pytest
from kubernetes.client.exceptions import ApiException

from plimsoll_cli.cluster.actions import format_exec_error

PATH = "/api/v1/namespaces/ns/pods/vllm-0/exec"
UPGRADE = "Handshake status {} -+-+- {{'content-length': '{}'}} -+-+- b'{}'"


@pytest.mark.parametrize(
    ("status", "length", "body", "told"),
    [
        ("403 Forbidden", 404, "no", "you are not allowed to create pods/exec in namespace ns"),
        ("404 Not Found", 403, "pods not found", "pod vllm-0 does not exist"),
        # Lengths, dates and names of pods are numbers, too.
        ("400 Bad Request", 403, "pod vllm-0 does not have a host assigned", "no.* a host"),
        ("500 Internal Server Error", 404, "dial tcp 10.0.0.1:10403: refused", "500 Internal"),
        ("400 Bad Request", 200, "container supervisor is not valid for pod", "has no container"),
    ],
)
def test_the_status_of_the_upgrade_decides(status: str, length: int, body: str, told: str) -> None:
    failure = ApiException(status=0, reason=UPGRADE.format(status, length, body))
    text = format_exec_error(failure, PATH, "vllm-0", "supervisor", "https://cluster")
    assert re.search(told, text), text
    assert ("you are not allowed to" in text) is status.startswith("403")


def test_a_status_of_its_own_counts_without_an_upgrade() -> None:
    failure = ApiException(status=403, reason="Forbidden")
    assert "you are not allowed to" in format_exec_error(
        failure, PATH, "vllm-0", "supervisor", "https://cluster"
    )
