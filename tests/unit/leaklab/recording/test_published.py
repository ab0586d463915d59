"""The recordings that are published: whole, labelled, within bounds, and named by their page."""

from __future__ import annotations

from pathlib import Path

import pytest

from leaklab.recording import page
from leaklab.recording.published import FOLDER, LABELS, TRACE, Recording, add, recordings
from leaklab.recording.split import DRAWN, HELD_OUT, SEEN, part
from plimsoll_api import trace
from plimsoll_api.assessment import Segment
from plimsoll_api.engines import EngineType
from plimsoll_api.incidents import IncidentKind

EVERY = list(recordings())
MOST_BYTES = 20 << 20
LONGEST_DEVICE_RUN_S, SHORTEST_CPU_RUN_S, LONG_S = 480.0, 590.0, 1500.0
MOST_FAILED = 0.005
"""Of the clients of a recording, where the engine was not restarted."""
OWN_FAILURES = {
    "deep_queue": "clients stop waiting in the queue that the run is about",
    "late_adapters": "the engine answers 404 until it has loaded an adapter",
}
"""Mechanisms whose requests may fail, with the reason."""
FEW_REQUESTS = {"quiet"}
"""Mechanisms with less than one request a second."""


def test_each_part_has_the_files_of_its_recordings_and_no_others() -> None:
    folders = {one.about["part"] for one in EVERY}
    assert {SEEN, HELD_OUT} <= folders <= {SEEN, HELD_OUT, DRAWN}
    for folder in folders:
        mine = {one.name for one in EVERY if one.about["part"] == folder}
        due = {f"{name}{ending}" for name in mine for ending in (TRACE, LABELS)}
        assert {path.name for path in (FOLDER / folder).iterdir()} == due


def test_there_are_enough_of_both_kinds_and_they_are_small() -> None:
    on_a_cpu = [one for one in EVERY if not one.about["machine"].get("devices")]
    of_others = [one for one in on_a_cpu if one.about["engine"] != EngineType.PLIMSOLL]
    assert len(EVERY) >= 70
    assert len(of_others) >= 40
    assert sum(one.about["recorded_s"] >= LONG_S for one in of_others) >= 3
    for chosen in (EVERY, of_others):
        leaks = sum(bool(one.labels.leaks) for one in chosen)
        assert 0.4 <= leaks / len(chosen) <= 0.6
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size <= MOST_BYTES


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_a_trace_is_whole_and_as_it_was_made(one: Recording) -> None:
    header, samples = trace.read(one.trace)
    every = list(samples)
    assert header.name in one.name
    assert one.about["mechanism"] not in one.trace.read_bytes()[:4096].decode("latin-1")
    assert (header.engine.type, header.engine.version) == (
        one.about["engine"], one.about["version"]
    )  # fmt: skip
    assert header.shared_device is one.about["shared_device"]
    assert header.budget.host is not None
    assert len(every) == one.about["samples"] >= 300
    assert one.about["unanswered_samples"] == sum(not sample.scrape_ok for sample in every)
    if header.shared_device:
        assert every[-1].t - every[0].t <= LONGEST_DEVICE_RUN_S
        served = [s for s in every if s.load.running is not None]
        known = [s for s in served if any(one.torch is not None for one in s.device)]
        assert len(known) >= 0.85 * len(served), "the engine's own share of the device"
    if not one.about["machine"].get("devices"):
        assert every[-1].t - every[0].t >= SHORTEST_CPU_RUN_S
    if not one.about["restarts_s"] and one.about["mechanism"] not in OWN_FAILURES:
        clients = one.about["clients"]
        assert clients.get("failed", 0) <= MOST_FAILED * sum(clients.values())
    if one.about["mechanism"] not in FEW_REQUESTS:
        assert one.about["clients"]["answered"] >= len(every)


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_labels_are_within_the_trace_and_say_what_was_counted(one: Recording) -> None:
    assert one.about["part"] == part(one.about["mechanism"])
    assert one.labels.negative is not bool(one.labels.leaks)
    assert one.labels.note
    last = list(trace.read(one.trace)[1])[-1].t
    for leak in one.labels.leaks:
        assert IncidentKind(leak.kind) in (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH)
        assert Segment(leak.segment)
        assert leak.mechanism == one.about["mechanism"]
        assert 0 <= leak.start_t < leak.end_t <= last + 0.05, "labels have tenths of a second"
        seconds = leak.end_t - leak.start_t
        assert leak.rate_bytes_per_s * seconds == pytest.approx(leak.counted_bytes, rel=0.01)


def test_the_page_has_a_row_for_each() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text, "recordings", page.made(EVERY)) == text, "run leaklab.recording.page"
    for one in EVERY:
        assert text.count(f"| `{one.name}` |") == (2 if one.seen else 1)


def test_a_load_names_each_shape_where_it_begins() -> None:
    phases = [[90.0, 1.0, "answers"], [15.0, 4.0, "long"], [15.0, 0.5, "long"]]
    assert (
        page.load({"load": phases}) == "answers 1 for 90 s, then long 4 for 15 s, then 0.5 for 15 s"
    )
    assert page.load({"load": phases[:1]}) == "answers 1"


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="verdicts"):
        page.filled("no marks", "verdicts", [])


def test_what_the_rig_wrote_is_added_to_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, target = tmp_path / "rig", tmp_path / "published"
    rig.mkdir()
    target.mkdir()
    monkeypatch.setattr("leaklab.recording.published.FOLDER", target)
    monkeypatch.setattr("leaklab.recording.published.RUNS", target / "runs.json")
    for name, where in (("cpu-a", HELD_OUT), ("cpu-b", DRAWN)):
        (rig / f"{name}.jsonl.gz").write_bytes(b"trace")
        (rig / f"{name}.labels.json").write_text('{"leaks": [], "negative": true, "note": "n"}')
        (rig / f"{name}.run.json").write_text(f'{{"part": "{where}"}}')
    assert add(rig) == ["cpu-a", "cpu-b"]
    found = {one.name: (one.seen, one.trace.read_bytes()) for one in recordings()}
    assert found == {"cpu-a": (True, b"trace"), "cpu-b": (False, b"trace")}
