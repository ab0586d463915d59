"""Watches reach the API server where everything else of the operator reaches it.

Tests ``runtime/watches.py``.
"""

from __future__ import annotations

import kopf
import pytest

from plimsoll_operator.runtime.watches import use_ip_address

ACCOUNT = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t", ca_path="/ca")


@pytest.mark.parametrize(
    ("environ", "server"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "https://10.96.0.1:443"),
        (
            {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"},
            "https://[fd00::1]:6443",
        ),
        ({}, "https://kubernetes.default.svc"),
    ],
)
def test_a_pod_needs_no_dns_for_its_watches(environ: dict[str, str], server: str) -> None:
    found = use_ip_address(ACCOUNT, environ)
    assert found.server == server
    assert (found.token, found.ca_path) == ("t", "/ca")
