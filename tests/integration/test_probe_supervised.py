"""A leak in a plain Python server that has the probe loaded, beside a supervisor that reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.supervision import Action
from plimsoll_api.supervisor_config import PROBE_DIR_ENV
from plimsoll_probe.install import install
from tests.integration.test_external_incident import Pod


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    sockets, library = tmp_path / "sockets", tmp_path / "library"
    sockets.mkdir()
    install(library)
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(library)) if path]
    one = Pod(tmp_path, {PROBE_DIR_ENV: str(sockets), "PYTHONPATH": ":".join(paths)})
    yield one
    one.end()


def test_the_segment_is_named_a_trim_is_tried_and_stacks_are_kept(pod: Pod) -> None:
    pod.start()
    incident, told = pod.ended_incident()
    assert incident.phase is IncidentPhase.RESOLVED, told
    found = incident.attribution
    assert (found.segment, found.process) == ("malloc_in_use", "APIServer"), found
    steps = {step.step: step.message for step in incident.timeline}
    assert "called 1 probe" in steps[Action.TRIM.value]
    (stacks,) = (pod.state_dir / "diagnostics").glob("*/stacks.txt")
    assert "in leak" in stacks.read_text()
    (traced,) = (pod.state_dir / "diagnostics").glob("*/tracemalloc.txt")
    assert "standin_external.py" in traced.read_text()
