"""Watches reach the API server where everything else of the operator reaches it.

Tests ``runtime/watches.py``.
"""

from __future__ import annotations

import asyncio
import getpass
from pathlib import Path

import kopf
import pytest

from plimsoll_operator import main
from plimsoll_operator.config import parse_config
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.queue import WorkQueue
from plimsoll_operator.runtime.watches import Watches, use_ip_address

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


def test_watches_start_as_a_user_that_the_platform_assigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenShift gives a namespace a user without an entry in the image's ``/etc/passwd``."""

    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 1000660000")

    async def run() -> bool:
        config, watches = (
            parse_config(["run", "--namespace=ml"], {}),
            Watches(Store(), WorkQueue(1)),
        )
        watching = asyncio.create_task(main._run_kopf(watches, config, asyncio.Event()))
        done, _ = await asyncio.wait([watching], timeout=0.5)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=not done)
        return not done

    kubeconfig = tmp_path / "kubeconfig"
    cluster = "{server: http://127.0.0.1:9}"
    kubeconfig.write_text(
        f"clusters: [{{name: c, cluster: {cluster}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setenv("POD_ID", "")  # removed again after the test
    monkeypatch.delenv("POD_ID")
    monkeypatch.setattr(getpass, "getuser", fail)
    assert asyncio.run(run())
