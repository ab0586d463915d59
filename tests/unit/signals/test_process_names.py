"""Processes of vLLM and SGLang have the names that those engines give them; the rest has none.

The titles are those that vLLM 0.32 and SGLang 0.5.23 set.

Tests ``signals/engine_processes.py``.
"""

import pytest

from plimsoll_api.admin import ProcessNames, Role
from plimsoll_api.engines import EngineType
from plimsoll_sidecar.signals.engine_processes import (
    assign_roles,
    find_helper_name,
    find_process_names,
)

MAIN = 1
SERVE = "vllm serve m"
SPAWN = "python -c from multiprocessing.spawn import spawn_main;"
VLLM, SGLANG, CUSTOM = EngineType.VLLM, EngineType.SGLANG, EngineType.CUSTOM


@pytest.mark.parametrize(
    ("title", "kind", "name"),
    [
        ("VLLM::EngineCore", VLLM, "EngineCore"),
        ("VLLM::EngineCore_DP1", VLLM, "EngineCore"),
        ("VLLM::Worker_PP0_TP3", VLLM, "Worker"),
        ("chat::Worker", VLLM, "Worker"),  # VLLM_PROCESS_NAME_PREFIX
        ("ray::RayWorkerWrapper.execute_method", VLLM, "Worker"),
        ("VLLM::APIServer_2", VLLM, "APIServer"),
        ("sglang::scheduler_DP0_TP1", SGLANG, "scheduler"),
        ("sglang::detokenizer", SGLANG, "detokenizer"),
        ("sglang::tokenizer_worker:77", SGLANG, "tokenizer"),
        ("sglang::scheduler", VLLM, None),
        ("VLLM::" + "A" * 4096, VLLM, None),
        (SPAWN, VLLM, None),
        ("", VLLM, None),
        ("VLLM::Worker", CUSTOM, None),
    ],
)
def test_a_title_selects_a_known_name(title: str, kind: EngineType, name: str | None) -> None:
    assert find_helper_name([title], kind) == name
    assert find_helper_name([], kind) is None


@pytest.mark.parametrize(
    ("kind", "lines", "labels", "worker", "parts"),
    [
        (
            VLLM,
            [SERVE, "VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1", SPAWN],
            ["APIServer", "EngineCore", "Worker", "Worker", "other"],
            "Worker",
            ProcessNames("APIServer", "EngineCore", "Worker"),
        ),
        (
            VLLM,
            [SERVE, "VLLM::EngineCore"],
            ["APIServer", "EngineCore"],
            "EngineCore",
            ProcessNames("APIServer", "EngineCore", "EngineCore"),
        ),
        (
            VLLM,
            [SERVE, "VLLM::APIServer_0", "VLLM::APIServer_1", "VLLM::EngineCore"],
            ["frontend", "APIServer", "APIServer", "EngineCore"],
            "EngineCore",
            ProcessNames("APIServer", "EngineCore", "EngineCore"),
        ),
        (
            SGLANG,
            ["python -m sglang.launch_server", "sglang::scheduler", "sglang::detokenizer"],
            ["server", "scheduler", "detokenizer"],
            "scheduler",
            ProcessNames("server", "scheduler", "scheduler"),
        ),
        (VLLM, [SERVE, SPAWN], ["APIServer", "other"], None, ProcessNames("APIServer")),
        (CUSTOM, ["serve", "VLLM::Worker"], ["main process", "other"], None, ProcessNames()),
    ],
)
def test_each_process_has_its_name_and_the_unknown_has_none(
    kind: EngineType, lines: list[str], labels: list[str], worker: str | None, parts: ProcessNames
) -> None:
    processes = assign_roles([(pid, [line]) for pid, line in enumerate(lines, MAIN)], MAIN, kind)
    assert [one.label for one in processes] == labels
    assert processes[0].role is Role.FRONTEND
    assert {one.name for one in processes if one.role is Role.WORKER} == ({worker} - {None})
    assert find_process_names(processes, kind) == parts
