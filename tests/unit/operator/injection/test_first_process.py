"""Tests ``injection/first_process.py``: what depends on process 1, and what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.first_process import check_first_process
from plimsoll_operator.injection.options import OptionNames

Object = dict[str, Any]


def refusal(container: Object, field: str = "containers", **spec: Any) -> str:
    """What the check says of a pod with ``container``; empty if nothing."""
    pod = {field: [{"name": "engine", "image": "engine:1", **container}], **spec}
    try:
        check_first_process(pod, "spec", OptionNames())
    except InjectionError as error:
        return str(error)
    return ""


def pre_stop(*command: str) -> Object:
    return {"lifecycle": {"preStop": {"exec": {"command": list(command)}}}}


NAMES = (
    ("kill", "1"),
    ("kill", "-TERM", "1"),
    ("/bin/kill", "-s", "QUIT", "--", "1"),
    ("sh", "-c", "kill -TERM 1; sleep 60"),
    ("sh", "-c", "sleep 5 && exec kill -15 '1'"),
    ("sh", "-c", "kill -9 -1"),
    ("sh", "-c", "PID=1; kill $PID; sleep 9"),
    ("killall5", "-15"),
    ("pkill", "-TERM", "-P", "1"),
    ("pkill", "--parent", "1"),
    ("python", "-c", "import os, time; os.kill(1, 15); time.sleep(10)"),
    ("python3", "-c", "import os; os.kill( 1 ,signal.SIGTERM)"),
    ("python3", "-c", "import psutil; psutil.Process(1).terminate()"),
    ("python3", "-c", "signal.pidfd_send_signal(os.pidfd_open(1), 15)"),
    ("node", "-e", "process.kill(1, 'SIGTERM')"),
    ("node", "-e", "process.kill(1)"),
    ("ruby", "-e", 'Process.kill("TERM", 1)'),
    ("perl", "-e", "kill 'TERM', 1"),
    ("perl", "-e", "kill TERM => 1"),
    ("cat", "/proc/1/status"),
    ("sh", "-c", "test -d /proc/1"),
    ("sh", "-c", "grep -q vllm /proc/1/cmdline"),
    ("sh", "-c", "tr '\\0' ' ' < /proc/1/environ | grep READY"),
    ("sh", "-c", "tail --pid=1 -f /dev/null"),
    ("ps", "-p", "1"),
    ("nsenter", "-t", "1", "-m", "true"),
    ("py-spy", "dump", "--pid", "1"),
    ("jcmd", "1", "VM.flags"),
    ("jstack", "-l", "1"),
)
MUST_BE = (
    ("/init",),
    ("/sbin/init",),
    ("/usr/sbin/init", "--log-level=info"),
    ("/lib/systemd/systemd", "--system"),
    ("catatonit", "--", "vllm", "serve", "m"),
    ("sh", "-c", "prepare && exec /init"),
    ("python", "-c", 'import os, sys\nif os.getpid() != 1:\n    sys.exit("can only run as PID 1")'),
    ("python", "-c", "assert os.getpid() == 1"),
    ("python", "-c", "assert 1 == os.getpid()"),
    ("bash", "-c", '[ "$$" -eq 1 ] || exit 1; exec serve'),
    ("bash", "-c", "[[ $$$$ == 1 ]] && exec serve"),
    ("node", "-e", "if (process.pid !== 1) process.exit(1)"),
)
HARMLESS = (
    ("sh", "-c", "kill -TERM $(cat /run/engine.pid); sleep 60"),
    ("sh", "-c", "kill -1 42"),
    ("sh", "-c", "kill -TERM 12; sleep 1"),
    ("pkill", "-TERM", "-f", "vllm serve"),
    ("python", "-c", "import os; os.kill(os.getppid(), 1)"),
    ("python", "-c", "os.kill(int(open('/run/engine.pid').read()), 15)"),
    ("cat", "/proc/10/status"),
    ("cat", "/proc/self/status"),
    ("vllm", "serve", "org/model", "--tensor-parallel-size", "1", "-tp", "1"),
    ("sh", "-c", "sleep 1"),
    ("sh", "-c", "for i in 1 2 3; do sleep 1; done"),
    ("tail", "-n", "1", "/var/log/engine.log"),
    ("top", "-b", "-n", "1"),
    ("tini", "--", "vllm", "serve", "org/model"),
    ("dumb-init", "vllm", "serve", "org/model"),
    ("sh", "-c", "echo $$ > /run/engine.pid; exec serve"),
    ("python", "-c", "print(os.getpid())"),
    ("sh", "-c", "curl -sf -m 1 localhost:8000/health"),
    ("/opt/init/serve", "--config=/etc/init/conf"),
    ("sh", "-c", "skill-server --workers 1"),
)


@pytest.mark.parametrize("command", NAMES)
def test_a_hook_or_probe_that_names_process_1_is_refused(command: tuple[str, ...]) -> None:
    at = "spec.containers[engine]."
    for made, field in (
        (pre_stop(*command), "lifecycle.preStop.exec.command"),
        ({"livenessProbe": {"exec": {"command": list(command)}}}, "livenessProbe.exec.command"),
        ({"command": list(command)}, "command"),
        ({"args": list(command)}, "args"),
    ):
        assert refusal(made).startswith(f"{at}{field} names process 1")
        assert "exclude the workload with" in refusal(made)


@pytest.mark.parametrize("command", MUST_BE)
def test_a_command_that_must_be_process_1_is_refused(command: tuple[str, ...]) -> None:
    assert "engine].command must be process 1" in refusal({"command": list(command)})


@pytest.mark.parametrize("command", HARMLESS)
def test_other_commands_are_not_refused(command: tuple[str, ...]) -> None:
    assert not refusal({"command": list(command)})
    assert not refusal(pre_stop(*command))


@pytest.mark.parametrize(
    ("container", "field"),
    [
        ({"image": "lscr.io/linuxserver/faster-whisper:2"}, "image must be"),
        ({"image": "registry.access.redhat.com/ubi9/ubi-init:9.6"}, "image must be"),
        ({"image": "org/debian-systemd@sha256:0"}, "image must be"),
        (
            {"env": [{"name": "S6_KEEP_ENV", "value": "1"}]},
            "env[S6_KEEP_ENV] belongs to s6-overlay",
        ),
    ],
)
def test_an_image_with_an_init_system_is_refused_unless_a_command_replaces_it(
    container: Object, field: str
) -> None:
    assert f"engine].{field}" in refusal(container)
    assert not refusal({**container, "command": ["vllm", "serve", "org/model"]})


def test_containers_that_stay_are_looked_at_and_those_that_end_are_not() -> None:
    hook = pre_stop("kill", "1")
    sidecar = {**hook, "restartPolicy": "Always"}
    assert refusal(sidecar, "initContainers").startswith("spec.initContainers[engine].lifecycle")
    assert not refusal({"command": ["sh", "-c", "kill 1"]}, "initContainers")


def test_a_pod_that_shares_its_process_ids_already_is_as_it_was() -> None:
    assert not refusal(pre_stop("kill", "1"), shareProcessNamespace=True)
    assert refusal(pre_stop("kill", "1"), shareProcessNamespace=False)
