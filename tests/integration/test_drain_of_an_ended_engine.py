"""An external engine that ends while it is drained, and the next one, which nobody drains."""

import threading
import time
from pathlib import Path

import pytest

from plimsoll_api.admin import EngineState
from plimsoll_api.engines import EngineType
from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.slots import Slots
from plimsoll_sidecar.govern.command import Outcome, Result, Verb
from plimsoll_sidecar.signals.process_table import identify
from tests.integration.test_external_adapters import Rig, command, rig

__all__ = ["rig"]


@pytest.mark.parametrize("verb", [Verb.DRAIN, Verb.LEAVE])
def test_the_next_engine_serves_at_once(rig: Rig, tmp_path: Path, verb: Verb) -> None:
    main = identify(rig.start("vllm-pause", "--running=1"))
    adapter, state_dir = rig.adapter(EngineType.VLLM), tmp_path / "state"
    actuator = Actuator(
        adapter, Slots(), None, lambda _: (), state_dir, RestartBudget(), lambda: main
    )
    drain = command(adapter.status().epoch, verb, 30.0)
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(actuator.execute(drain)))
    thread.start()
    while readiness.is_ready(str(state_dir)):
        time.sleep(0.05)
    time.sleep(1.0)
    rig.processes[0].kill()
    rig.processes[0].wait(10)
    rig.start("vllm-pause")
    thread.join(20)
    assert [result.outcome for result in results] == [Outcome.REFUSED]
    assert not [call for call in rig.calls if call.startswith("/pause")]
    assert adapter.status().state is EngineState.SERVING
    assert readiness.is_ready(str(state_dir))
