"""What is suspected of an engine that is not ours names its process as that engine does.

Tests ``detect/detector.py`` and ``detect/segments.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leaklab.series import MIB, Series, steady
from plimsoll_api.admin import ProcessNames
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.trace import RoleRss, Sample
from plimsoll_sidecar.detect.segments import MAX_ROLES, RoleSizes

Judge = Callable[..., Any]

KNOWN = ProcessNames("APIServer", "EngineCore", "Worker")


class External(Series):
    parts = KNOWN

    def samples(self) -> Iterator[Sample]:
        for sample in super().samples():
            sample.parts, sample.ledger = self.parts, None
            for one in sample.host.by_process or []:
                one.role = {"worker": "EngineCore", "frontend": "APIServer"}[one.role]
            (sample.host.by_process or []).append(RoleRss("other", 50 * MIB))
            yield sample


class Untitled(External):
    parts = ProcessNames("APIServer")


def test_the_process_that_grew_has_the_engine_s_name(judge: Judge) -> None:
    leak = External(duration=900, leak=steady(1 * MIB, 100), segment="anonymous_other")
    assert judge(leak).first[IncidentKind.HOST_GROWTH][1].process == "EngineCore"


@pytest.mark.parametrize(("made", "process"), [(External, "Worker"), (Untitled, None)])
def test_device_memory_is_the_process_s_that_runs_the_model(
    judge: Judge, made: type[External], process: str | None
) -> None:
    leak = made(duration=900, leak=steady(2 * MIB, 100), device=True, segment="non_torch")
    assert judge(leak).first[IncidentKind.DEVICE_GROWTH][1].process == process


@pytest.mark.parametrize(("made", "process"), [(External, "EngineCore"), (Untitled, None)])
def test_a_stall_is_of_the_process_that_makes_the_steps(
    judge: Judge, made: type[External], process: str | None
) -> None:
    assert judge(made(duration=200, frozen_at=100)).first[IncidentKind.STALL][1].process == process


def test_a_frontend_that_answers_nobody_has_its_name(judge: Judge) -> None:
    hung = judge(External(duration=300, unresponsive=lambda t: t >= 100))
    assert hung.first[IncidentKind.STALL][1].process == "APIServer"


def test_growth_is_not_blamed_on_a_process_that_has_ended() -> None:
    roles = RoleSizes(lambda process: process.rss_anon)
    roles.update([RoleRss("helper", 10), RoleRss("server", 100)], warm=False)
    roles.update([RoleRss("helper", 900), RoleRss("server", 150)], warm=True)
    assert roles.find_largest() == "helper"
    roles.update([], warm=True)
    assert roles.find_largest() == "helper", "a sample that could not be read says nothing"
    roles.update([RoleRss("server", 160)], warm=True)
    assert (roles.find_largest(), roles.find_majority()) == ("server", "server")
    assert roles.bases == {"helper": 10, "server": 100}, "it may come back"


def test_names_that_never_end_are_not_all_kept() -> None:
    roles = RoleSizes(lambda process: process.rss_anon)
    for number in range(10 * MAX_ROLES):
        roles.update([RoleRss("server", number), RoleRss(f"job-{number}", 1)], warm=True)
    assert len(roles.bases) <= MAX_ROLES + 1
    assert roles.bases["server"] == 0
    assert roles.find_largest() == "server"
