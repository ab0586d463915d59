"""What is saved of an engine before anything is destroyed (``record/diagnostics.py``)."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import cast

from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command, Verb
from plimsoll_sidecar.record.diagnostics import DiagnosticsWriter


class Silent:
    def status(self) -> None:
        raise EngineError("no answer")

    def read_stacks(self, command: Command) -> None:
        return None


def test_an_engine_that_fills_the_shared_folder_costs_no_memory(tmp_path: Path) -> None:
    stacks = tmp_path / "run" / "stacks"
    stacks.mkdir(parents=True)
    for number in range(10_000):
        os.close(os.open(stacks / f"worker-{number}.txt", os.O_CREAT | os.O_WRONLY))
    engine = cast(EngineAdapter, Silent())
    diagnostics = DiagnosticsWriter(engine, tmp_path, tmp_path / "run", lambda: None)
    command = Command(verb=Verb.DIAGNOSE, operation_id="1", incident="i", epoch="a:1")
    tracemalloc.start()
    try:
        assert diagnostics.save(command) == (), "they are empty"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_an_incident_that_an_ended_supervisor_began_to_diagnose_is_not_diagnosed_again(
    tmp_path: Path,
) -> None:
    begun = tmp_path / "diagnostics" / "i" / "stacks.txt"
    begun.parent.mkdir(parents=True)
    begun.write_text("in leak")
    # An object without any method: the engine must not be asked.
    diagnostics = DiagnosticsWriter(cast(EngineAdapter, object()), tmp_path, tmp_path, lambda: None)
    command = Command(verb=Verb.DIAGNOSE, operation_id="1", incident="i", epoch="a:1")
    assert diagnostics.save(command) == ("diagnostics/i/stacks.txt",)
