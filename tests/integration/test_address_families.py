"""Everything of ours answers in networks with IPv4 alone, IPv6 alone and both.

Real processes in network namespaces. Tests ``listening.py``, ``clients/http.py``,
``admission/server.py`` and ``health.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervisor_config import EngineEndpoint, ServiceRef, SupervisorConfig
from plimsoll_operator.render.paths import POD_LAYOUT
from plimsoll_operator.render.supervisor import make_supervisor_args
from tests.missing import lacks

V4, V6 = "10.9.0.1", "fd00::1"
ADDRESSES = {"ipv4": (V4,), "ipv6": (V6,), "both": (V4, V6)}
SET_UP = {
    "ipv4": "sysctl -qw net.ipv6.conf.all.disable_ipv6=1; ip link set lo up;"
    f" ip addr add {V4}/32 dev lo; ip route add default dev lo src {V4}",
    "ipv6": "ip link set lo up;"
    f" ip -6 addr add {V6}/64 dev lo nodad; ip -6 route add default dev lo src {V6}",
}
SET_UP["both"] = f"{SET_UP['ipv6']}; ip addr add {V4}/32 dev lo"
FETCH = """
import json, ssl, sys, urllib.request
trusting = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), trusting)
def get(url):
    try:
        answer = opener.open(url, timeout=5)
        return [answer.status, answer.read().decode()]
    except OSError as error:
        return [getattr(error, "code", 0), str(error)]
print(json.dumps([get(url) for url in sys.argv[1:]]))
"""
OPERATOR = """
import asyncio, datetime, ssl, sys
from pathlib import Path
from typing import Any, cast
from plimsoll_operator.admission.certificate import create_ca_certificate, create_server_certificate
from plimsoll_operator.admission.server import AdmissionServer
from plimsoll_operator.config import Config
from plimsoll_operator.health import HealthServer
from plimsoll_operator.metrics import Metrics
async def main():
    class Watches:
        stale_kinds = staticmethod(lambda lists: [])
    health = HealthServer(cast(Any, None), cast(Any, Watches), Metrics(), Config())
    await health.serve(8080)
    now, folder = datetime.datetime.now(datetime.UTC), Path(sys.argv[1])
    made = create_server_certificate("webhook", create_ca_certificate(now), now)
    (folder / "pem").write_bytes(made.certificate + made.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "pem")
    await AdmissionServer(lambda body: b"{}", lambda: None).run(9443, context)
asyncio.run(main())
"""


class Network:
    """A network namespace; its programs end with it."""

    def __init__(self, family: str) -> None:
        missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            lacks(f"{', '.join(missing)} missing" if missing else "namespaces need root")
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-ec", f"{SET_UP[family]}; echo ready; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            lacks(f"this machine has no {family}")
        self._started: list[subprocess.Popen[bytes]] = []

    def _inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", *command]

    def start(self, *arguments: str) -> None:
        """Run a Python program until the namespace ends."""
        command = self._inside(sys.executable, *arguments)
        self._started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def get(self, *urls: str) -> list[tuple[int, str]]:
        """Return status and body for each URL; status 0 and the error without an answer."""
        done = subprocess.run(
            self._inside(sys.executable, "-c", FETCH, *urls),
            capture_output=True, check=True, timeout=60,
        )  # fmt: skip
        return [(status, text) for status, text in json.loads(done.stdout)]

    def until(self, url: str, holds: Callable[[int, str], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds(*(found := self.get(url)[0])):
            assert all(one.poll() is None for one in self._started), f"a program ended: {found}"
            assert time.monotonic() < deadline, f"{url}: {found}"
            time.sleep(0.2)

    def answers_everywhere(
        self, addresses: tuple[str, ...], *paths: str, tls: bool = False
    ) -> None:
        """Each of ``paths`` (``:PORT/PATH``) answers at each address, and at the loopback's."""
        hosts = ["127.0.0.1", *(f"[{one}]" if ":" in one else one for one in addresses)]
        hosts += ["[::1]"] if V6 in addresses else []
        urls = [f"http{'s' * tls}://{host}{path}" for host in hosts for path in paths]
        found = dict(zip(urls, self.get(*urls), strict=True))
        assert {url: text for url, (status, text) in found.items() if not status} == {}

    def close(self) -> None:
        for one in self._started:
            one.terminate()
        for one in self._started:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture(params=list(ADDRESSES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def network(family: str) -> Iterator[Network]:
    with ExitStack() as ends:
        one = Network(family)
        ends.callback(one.close)
        yield one


def start_supervisor(network: Network, folder: Path) -> None:
    """Start it with the arguments that the operator writes."""
    at = replace(
        POD_LAYOUT,
        run_dir=f"{folder}/run", state_dir=f"{folder}/state", config_file=f"{folder}/config.json",
    )  # fmt: skip
    url = "http://127.0.0.1:8000"
    config = SupervisorConfig(
        service=ServiceRef(name="families"),
        engine=EngineEndpoint(EngineType.CUSTOM, url, url),
        memory=MemoryPolicy(),
        supervision=Supervision(mode=Mode.OBSERVE),
    )
    Path(at.config_file).write_bytes(supervisor_config.encode_config(config))
    network.start("-m", "plimsoll_sidecar.launcher", *make_supervisor_args(at))


def test_the_supervisor_answers_probes_and_scrapes(
    network: Network, family: str, tmp_path: Path
) -> None:
    start_supervisor(network, tmp_path)
    network.until("http://127.0.0.1:9464/metrics", lambda status, text: status == 200)
    network.answers_everywhere(ADDRESSES[family], ":9465/live", ":9465/ready", ":9464/metrics")


@pytest.mark.parametrize("where", ["127.0.0.1", "::1", V6])
def test_an_engine_is_found_at_any_address_of_its_pod(where: str, tmp_path: Path) -> None:
    with ExitStack() as ends:
        network = Network("both")
        ends.callback(network.close)
        network.start("-m", "http.server", "8000", "--bind", where, "--directory", str(tmp_path))
        start_supervisor(network, tmp_path)
        network.until(
            "http://127.0.0.1:9464/state",
            lambda _, text: (
                text.startswith("{") and json.loads(text).get("engine_state") == "serving"
            ),
        )


def test_operator_and_webhook_answer(network: Network, family: str, tmp_path: Path) -> None:
    network.start("-c", OPERATOR, str(tmp_path))
    network.until("https://127.0.0.1:9443/", lambda status, text: status == 404)
    network.answers_everywhere(ADDRESSES[family], ":9443/", tls=True)
    network.answers_everywhere(ADDRESSES[family], ":8080/healthz", ":8080/readyz", ":8080/metrics")


@pytest.mark.parametrize("family", ["ipv6"])
def test_our_engine_answers(network: Network, family: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "admin-token").write_text("t")
    network.start(
        "-m", "plimsoll_engine", "serve", f"--model={tiny}", f"--run-dir={tmp_path}",
        "--device=cpu", "--dtype=float32",
    )  # fmt: skip
    network.until("http://127.0.0.1:8000/ready", lambda status, text: status == 200, 300.0)
    network.answers_everywhere(ADDRESSES[family], ":8000/ready", ":8000/metrics")
