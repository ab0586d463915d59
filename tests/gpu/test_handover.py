"""Keys and values over a planned restart on one GPU, behind the HTTP API, with and without standby.

Tests ``core/handover/inheritance.py`` and ``frontend/workers/standby.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plimsoll_faults.models.tiny import write_checkpoint
from tests.integration.engine.conftest import Engine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
CLIENTS, TOKENS, RESTARTS = 4, 600, 3


def standby_prepared(engine: Engine, policy: str) -> None:
    """Until there is one, which is asked for where the policy says so."""
    if policy == "on-suspicion":
        body = {"expected_epoch": engine.status()["epoch"], "lease_s": 60.0}
        assert engine.admin("POST", "/standby", body)[0] == 200
    engine.until(lambda: engine.status()["standby"] == {"state": "prepared"}, "a standby", 60)


@pytest.mark.parametrize("standby", ["never", "always", "on-suspicion"])
def test_streams_go_on_with_their_keys_and_values(tmp_path: Path, standby: str) -> None:
    write_checkpoint(tmp_path / "tiny")
    engine = Engine(
        tmp_path / "tiny", tmp_path / "run", "--device", "cuda", "--num-blocks", "4096",
        "--standby-worker", standby,
    )  # fmt: skip
    try:
        engine.wait_ready()
        with engine.streams(CLIENTS, TOKENS) as futures:
            undisturbed = [future.result(120).text for future in futures]
        for number in range(RESTARTS):
            if standby != "never":
                standby_prepared(engine, standby)
            with engine.streams(CLIENTS, TOKENS) as futures:
                engine.begin("restart", f"gpu-{number}")
                operation = engine.finish(f"gpu-{number}", 60)
                assert [future.result(120).text for future in futures] == undisturbed
            assert operation["state"] == "succeeded", operation
            assert operation["kv_handover"] == "handed_over", operation
            assert operation["carried_prefill_tokens"] == 0, operation
            stopped = next(step for step in operation["steps"] if step["name"] == "stop_worker")
            assert stopped["before_bytes"] == stopped["after_bytes"], "all of the device came back"
            assert "stopped (" in stopped["detail"], "it says where the time went"
            engine.clean()
        if standby == "always":
            engine.until(
                lambda: any(
                    e["owner"] == "standby_worker_device" for e in engine.status()["ledger"]
                ),
                "the standby's device memory",
                60,
            )
    finally:
        engine.end()
