"""How the rig ends an engine in the middle of a recording: real processes, in a real container."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from leaklab.recording.recorded_run import end
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import Command

OBEYS, REFUSES = "", 'trap "" TERM; '


@pytest.mark.parametrize(
    ("program", "told"),
    [(OBEYS, "was killed by SIGTERM"), (REFUSES, "was killed by SIGKILL")],
    ids=["obeys", "refuses"],
)
def test_an_engine_that_does_not_end_in_its_grace_is_killed_and_starts_again(
    tmp_path: Path, program: str, told: str
) -> None:
    log = tmp_path / "engine.log"
    argv = ("/bin/sh", "-c", f"{program}echo serves; while :; do sleep 0.05; done")
    engine = Container(Command("engine", argv, dict(os.environ), log), lambda told: None)

    async def serves(times: int) -> None:
        deadline = time.monotonic() + 20.0
        while not log.exists() or log.read_text().count("serves") < times:
            assert time.monotonic() < deadline, "it does not start"
            await asyncio.sleep(0.02)

    async def run() -> str | None:
        engine.start()
        try:
            await serves(1)
            await end(engine, grace_s=0.5)
            await serves(2)
            return engine.last_exit
        finally:
            await engine.stop(0.1)

    assert asyncio.run(run()) == told
