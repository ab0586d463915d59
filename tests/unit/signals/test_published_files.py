"""A supervisor believes what the operator published while it is within its bounds.

Tests ``signals/other_pods.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api import learned
from plimsoll_api.learned import LearnedMemory, LearnedWorkload
from plimsoll_api.workloads import WorkloadRef
from plimsoll_sidecar.signals.other_pods import LearnedFile


def test_what_was_learned_is_read_for_the_own_workload(tmp_path: Path) -> None:
    path = tmp_path / learned.LEARNED_FILE
    file = LearnedFile(path)
    assert file.read(None) is None
    service = LearnedWorkload("", "64d8", 1, host=LearnedMemory(60, (1, 2, 3), 4, 5))
    other = LearnedWorkload("Deployment/qwen", "1", 1, device=LearnedMemory(budget=7))
    path.write_bytes(learned.encode_learned_workloads([service, other]))
    assert file.read(None) == service
    assert file.read(WorkloadRef("Deployment", "qwen")) == other
    assert file.read(WorkloadRef("Deployment", "llama")) is None


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[" * 200_000,
        b'[{"workload":"","revision":"","at":1}]',
        b'[{"workload":"","revision":"a","at":-1}]',
        b'[{"workload":"","revision":"a","at":1,"host":{"budget":0}}]',
        b'[{"workload":"","revision":"a","at":1,"host":{"gains":[1,2]}}]',
        b'[{"workload":"","revision":"a","at":1,"host":{"seen_s":1e99}}]',
    ],
)
def test_lessons_that_break_a_bound_say_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / learned.LEARNED_FILE
    path.write_bytes(data)
    assert LearnedFile(path).read(None) is None


@given(st.binary(max_size=300))
def test_no_bytes_end_a_supervisor(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("learned") / learned.LEARNED_FILE
    path.write_bytes(data)
    LearnedFile(path).read(None)
