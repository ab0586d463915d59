"""A command line is an engine's by its program alone: paths and arguments name anything.

Tests ``signals/engine_processes.py``.
"""

import pytest

from plimsoll_api.engines import EngineType
from plimsoll_sidecar.signals.engine_processes import (
    get_default_port,
    has_helper_title,
    is_engine_command,
    is_helper_command,
    may_listen_on,
)
from plimsoll_sidecar.signals.process_table import Container

VLLM, SGLANG = EngineType.VLLM, EngineType.SGLANG


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("/opt/venv/bin/python /opt/venv/bin/vllm serve m --port 8000", VLLM),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", VLLM),
        ("python -u -m sglang.launch_server --model-path m", SGLANG),
        ("vllm serve m", VLLM),
    ],
)
def test_engines(line: str, kind: EngineType) -> None:
    assert is_engine_command(line.split(), kind)
    assert not is_engine_command(line.split(), VLLM if kind is SGLANG else SGLANG)


@pytest.mark.parametrize(
    "line",
    [
        "python -m pytest tests/gpu/test_vllm.py",
        "make -C /src/vllm serve",
        "pip install vllm",
        "vim vllm",
        "python proxy.py --backend vllm",
        "bash -c vllm serve m",
        "envoy -c /etc/vllm",
        "python /src/vllm/setup.py build",
    ],
)
def test_what_only_names_one(line: str) -> None:
    words = line.split()
    assert not is_helper_command(words, VLLM)
    assert not is_engine_command(words, VLLM)


def test_helpers_are_parts_of_an_engine_and_never_one() -> None:
    for title in ("VLLM::EngineCore", "VLLM::Worker_TP0"):
        assert is_helper_command([title], VLLM)
        assert not is_engine_command([title], VLLM)
    assert is_helper_command(["sglang::scheduler"], SGLANG)
    tracker = ["python", "-B", "-c", "from multiprocessing.resource_tracker import main;main(5)"]
    assert is_helper_command(tracker, VLLM)
    assert not has_helper_title(tracker, VLLM), "any program's"


def test_ports() -> None:
    assert may_listen_on(["vllm", "serve", "m", "--port", "81"], 81, None)
    assert not may_listen_on(["vllm", "serve", "m", "--port", "81"], 82, 82)
    assert may_listen_on(["vllm", "serve", "m", "--port=82"], 82, None)
    assert not may_listen_on(["vllm", "serve", "m"], 81, get_default_port(VLLM))
    assert may_listen_on(["vllm", "serve", "m"], 8000, get_default_port(VLLM))
    assert may_listen_on(["vllm", "serve", "m", "--port", "$PORT"], 81, None)
    # int() refuses both, and isdigit() does not: a process in the pod ended the supervisor.
    assert may_listen_on(["vllm", "serve", "m", "--port=²"], 81, None)
    assert may_listen_on(["vllm", "serve", "m", "--port", "8" * 5000], 81, None)


def test_two_sessions_of_one_machine_are_no_containers() -> None:
    mine = Container("/user.slice/session-1.scope", 5)
    assert not Container("/user.slice/session-2.scope", 5).is_different_from(mine)
    pod = Container("/kubepods/pod1/engine", 7)
    assert pod.is_different_from(mine)
    assert pod.is_same_as(Container("/kubepods/pod1/engine", None)), (
        "one whose mounts may not be read"
    )
    assert not pod.is_same_as(Container("/kubepods/pod1/proxy", 7))
