"""The leak lab with real processes: the plain engine here, our engine with each fault in the long
runs. ``research/bench/leaklab.py`` plays the same cases and writes down what came out."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leaklab import replicas
from leaklab.play import Played, disruptions, plan_of, play
from leaklab.real_cases import ENGINE_CASES, PLAIN_CASES, SOUND_CASES, RealCase
from leaklab.replicas import Policy
from plimsoll_api.incident_record import IncidentRecord, Reason
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.supervision import Mode
from plimsoll_cli.local import runner

WATCH = Policy(growth_mib=48, warmup="0.5s", interval_s=0.25, mode=Mode.OBSERVE)


async def watch(root: Path, mechanism: str, seconds: float, *flags: str) -> list[IncidentRecord]:
    """What a supervisor that may do nothing opened within ``seconds``, or until one has ended."""
    name = mechanism.replace("_", "-")
    its_plan = replicas.plain(name, root / name, WATCH, os.environ, mechanism, *flags)
    async with runner.run_replica(its_plan, print):
        for _ in range(int(2 * seconds)):
            await asyncio.sleep(0.5)
            if any(incident.ended for incident in replicas.journal(its_plan)):
                break
    return replicas.journal(its_plan)


def test_a_real_leak_is_named_and_real_garbage_is_not(tmp_path: Path) -> None:
    async def both() -> tuple[list[IncidentRecord], list[IncidentRecord]]:
        leak = watch(tmp_path, "shared", 40.0, "--rate-mib-s=8")
        return await asyncio.gather(leak, watch(tmp_path, "sawtooth", 22.0, "--speed=10"))

    leaked, healthy = asyncio.run(both())
    assert [(one.kind, one.reason) for one in leaked] == [
        (IncidentKind.HOST_GROWTH, Reason.OBSERVED)
    ]
    assert leaked[0].attribution.segment == "shared"
    assert leaked[0].attribution.process == "main process"
    assert 4 << 20 < (leaked[0].attribution.bytes_per_s or 0) < 16 << 20
    assert healthy == []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {"tiny": folder / "tiny", "llava": folder / "llava"}
    for name, program in (("tiny", ["tiny"]), ("llava", ["tiny_media", "llava"])):
        command = [sys.executable, "-m", f"plimsoll_faults.models.{program[0]}", *program[1:]]
        subprocess.run([*command, str(made[name])], check=True, timeout=600)
    return made


def check(played: Played) -> None:
    told = played.row()
    assert played.found, told
    assert played.named, told
    assert played.cured, told
    assert played.counts.broken == 0, told
    assert played.counts.failed == 0, told


@pytest.mark.long
@pytest.mark.parametrize("case", PLAIN_CASES, ids=lambda case: case.name)
def test_a_leak_of_a_plain_engine_is_cured(case: RealCase, tmp_path: Path) -> None:
    check(asyncio.run(play(case, plan_of(case, tmp_path, {}, plain=True), plain=True)))


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in ENGINE_CASES if not c.gap], ids=lambda case: case.name)
def test_a_fault_of_our_engine_is_cured(
    case: RealCase, tmp_path: Path, models: dict[str, Path]
) -> None:
    check(asyncio.run(play(case, plan_of(case, tmp_path, models, plain=False), plain=False)))


@pytest.mark.long
@pytest.mark.parametrize("case", SOUND_CASES, ids=lambda case: case.name)
def test_an_engine_without_a_fault_is_left_alone(
    case: RealCase, tmp_path: Path, models: dict[str, Path]
) -> None:
    case = replace(case, limit_s=90.0)
    played = asyncio.run(play(case, plan_of(case, tmp_path, models, plain=False), plain=False))
    told = played.row()
    assert played.incident is None or not disruptions(played.incident), told
    assert not any(
        kind in str(told) for kind in (IncidentKind.CAPACITY_LOSS, IncidentKind.STALL)
    ), told
    assert (played.counts.broken, played.counts.failed) == (0, 0), told
