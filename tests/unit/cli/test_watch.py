"""What ``plimsoll watch`` makes of its words, and of what container runtimes say.

Tests ``local/watch.py`` and ``local/endpoint.py``; with real engines: tests/integration.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

import pytest

from plimsoll_api.decoding import decode
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import CONTAINER_ENV, ServiceRef, SupervisorConfig
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import endpoint, plan, watch
from tests.http_server import Handler, answering
from tests.ports import free_port


class Vllm(Handler):
    """A metrics page of vLLM."""

    def do_GET(self) -> None:
        self.answer(200, b"vllm:num_requests_running 0\n")


def test_budgets_have_a_size_unless_they_are_to_set_themselves() -> None:
    policy = watch.make_memory_policy(None, "64Mi", None, "5s")
    assert policy.host is not None
    assert policy.device is not None
    assert (policy.host.growth_bytes, policy.host.window_s) == (2 << 30, 86_400.0)
    assert policy.device.growth_bytes == 64 << 20
    assert policy.warmup_s == 5.0
    assert not policy.host.auto, "the first day of a person who recovers an engine counts"
    own = watch.make_memory_policy("Auto", None, None, "5s").host
    assert own is not None
    assert own.auto


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("lots", None, None, "5s"), "--host-budget"),
        ((None, "0", None, "5s"), "--device-budget 0: must be at least 1Mi, not '0'"),
        ((None, None, "1 day", "5s"), "--window"),
        ((None, None, None, "soon"), "--warmup"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    given: tuple[str | None, str | None, str | None, str], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        watch.make_memory_policy(*given)


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        ("http://192.0.2.1:8000", UsageError, "192.0.2.1 is not an address of this machine"),
        ("http://no-such-host.invalid:8000", UsageError, "is not an address of this machine"),
        ("ftp://127.0.0.1:21", UsageError, "write the URL as http://HOST:PORT"),
        ("http://127.0.0.1:70000", UsageError, "write the URL as http://HOST:PORT"),
        ("127.0.0.1:FREE", RunError, "no server answers at this address: start the engine first"),
        (str(2**22 + 1), UsageError, "does not exist"),
        ("OWN", UsageError, "an ancestor of plimsoll itself"),
        ("no-such.service", RunError, "no systemd unit with this name is running"),
        ("no such container", UsageError, "not a URL, a PID, a systemd unit"),
    ],
)
def test_what_cannot_be_watched_is_told_with_what_to_do(
    target: str, error: type[Exception], text: str
) -> None:
    target = target.replace("FREE", str(free_port())).replace("OWN", str(os.getpid()))
    with pytest.raises(error, match=text):
        endpoint.find_engine(target)


def test_ports_that_never_answer_do_not_delay_the_engine() -> None:
    """As those of PyTorch's ranks in vLLM, which accept a request and wait."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in silent]
        port = stack.enter_context(answering(Vllm))
        serving = f"http://127.0.0.1:{port}"
        for expected, limit_s in ((port, 5.0), (8000, 15.0)):
            begun = time.monotonic()
            found = endpoint._find_serving_url([*urls, serving], EngineType.CUSTOM, expected)
            assert found == (serving, EngineType.VLLM)
            assert time.monotonic() - begun < limit_s


def test_a_runtime_tells_published_ports_and_addresses() -> None:
    """In the form of ``docker inspect``, of which nearly everything is left out."""
    text = json.dumps(
        [
            {
                "Id": "1f0e",
                "Name": "/vllm",
                "State": {"Status": "running", "Running": True, "Pid": 4711},
                "NetworkSettings": {
                    "Ports": {
                        "8000/tcp": [
                            {"HostIp": "0.0.0.0", "HostPort": "18000"},
                            {"HostIp": "::", "HostPort": "18000"},
                        ],
                        "8001/tcp": None,
                        "9000/udp": [{"HostIp": "", "HostPort": "9000"}],
                    },
                    "Networks": {"bridge": {"IPAddress": "172.17.0.2"}, "none": {"IPAddress": ""}},
                },
            }
        ]
    )
    (found,) = decode(text.encode(), list[endpoint._ContainerInspection])
    assert found.state.pid == 4711
    assert found.list_addresses() == ["http://127.0.0.1:18000", "http://172.17.0.2"]


def test_a_command_says_which_engine_it_starts_and_where(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = endpoint.find_engine_of_command([str(program), "serve", "m", "--port=8123"], None)
    assert (found.name, found.endpoint.type) == ("vllm-8123", EngineType.VLLM)
    assert found.endpoint.serving_url == "http://127.0.0.1:8123"
    assert endpoint.find_engine_of_command([str(program), "serve"], None).name == "vllm-8000"
    with pytest.raises(UsageError, match="port of the engine is unknown"):
        endpoint.find_engine_of_command(["true"], None)
    with pytest.raises(UsageError, match="the program does not exist"):
        endpoint.find_engine_of_command(["no-such-program"], 1)


def test_the_started_engine_has_the_name_by_which_its_supervisor_knows_it(tmp_path: Path) -> None:
    found = endpoint.find_engine_of_command(["true"], 8123)
    config = SupervisorConfig(ServiceRef(found.name), found.endpoint)
    made = plan.plan_supervisor(config, tmp_path, [1, 2], {"POD_IP": "::"}, ["/bin/true"])
    assert made.engine is not None
    assert made.engine.env[CONTAINER_ENV] == found.endpoint.container != ""
    assert "POD_NAME" not in made.supervisor.env, "a drain would wait for endpoints"
    assert plan.plan_supervisor(config, tmp_path, [1, 2], {}).engine is None
