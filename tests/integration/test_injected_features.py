"""The leaks that engines really had are found and end with experts, FP8 and drafts, too.

Tests ``plimsoll_faults/defects``, ``memory/audit.py`` and ``worker/lifecycle.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import Exited
from plimsoll_engine.process.stacks import make_stacks_path
from plimsoll_faults.models import tiny, tiny_moe
from plimsoll_faults.models.write_fp8 import write_fp8
from tests.integration.test_worker_process import (
    PROMPT,
    Harness,
    Link,
    eventually,
    generate,
    reports_after,
    send,
)

NAMES, TOKENS = ["a", "b", "c"], 40


@pytest.fixture(params=["experts", "fp8"])
def features(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A model and its settings: experts with prompt lookup, or FP8 weights with a draft model."""
    if request.param == "experts":
        tiny_moe.write_checkpoint(tmp_path / "experts")
        return {"model": str(tmp_path / "experts"), "speculative": Speculative("ngram", 4, 4, 1)}
    tiny.write_checkpoint(tmp_path / "draft")
    write_fp8(tmp_path / "draft", tmp_path / "fp8")
    drafts = Speculative("draft_model", 4, model=str(tmp_path / "draft"))
    return {"model": str(tmp_path / "fp8"), "speculative": drafts}


@pytest.fixture
def start(features: dict[str, Any]) -> Iterator[Callable[..., Harness]]:
    started: list[Harness] = []

    def make(inject: str, **config: Any) -> Harness:
        whole = features | {"kv_cache_dtype": "fp8", "inject": inject} | config
        started.append(Harness(Path(whole.pop("model")), warm=True, **whole))
        return started[-1]

    yield make
    for harness in started:
        harness.close()


def rules(link: Link) -> set[str]:
    """What an audit finds."""
    send(link, worker_ipc.AuditQuery("q"))
    return {finding.rule for finding in link.wait_for(worker_ipc.AuditReport).findings}


def stopped(link: Link) -> worker_ipc.StopResult:
    send(link, worker_ipc.Stop())
    found: worker_ipc.StopResult = link.wait_for(worker_ipc.StopResult)
    link.socket.close()
    return found


def test_leaks_of_requests_and_instances_are_found_and_a_restart_ends_them(
    start: Callable[..., Harness],
) -> None:
    harness = start("request_cycle:payload_bytes=64Ki;method_cache:bytes_per_request=64Ki")
    _, link = harness.serving(1)
    texts = generate(link, NAMES, TOKENS)
    drafted = reports_after(link, len(NAMES))
    assert drafted.draft_tokens_total > 0
    assert rules(link) >= {"released_requests_die", "methods_cache_no_instances"}
    end = stopped(link)
    assert end.device_allocated == end.device_baseline

    _, healthy = harness.serving(2)
    assert generate(healthy, NAMES, TOKENS) == texts
    assert rules(healthy) == set()


def test_an_eviction_that_spins_leaves_its_stacks_and_a_successor_goes_on(
    start: Callable[..., Harness],
) -> None:
    harness = start("eviction_loop:after_requests=3")
    pid, link = harness.serving(1)
    texts = generate(link, NAMES, TOKENS)
    send(link, Submit("d", PROMPT, Sampling(max_tokens=3)))
    with pytest.raises(TimeoutError):
        link.wait_for(worker_ipc.StopResult, 1.0)
    os.kill(pid, signal.SIGUSR1)
    stacks = make_stacks_path(harness.run_dir, "worker", pid)
    assert eventually(lambda: "evict" in stacks.read_text())
    os.kill(pid, signal.SIGKILL)
    assert harness.control.wait_for(Exited).status == -signal.SIGKILL
    _, successor = harness.serving(2)
    assert generate(successor, NAMES, TOKENS) == texts
    assert rules(successor) == set()
