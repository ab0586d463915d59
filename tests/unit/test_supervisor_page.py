"""The page's parts: bounded history, a chart with known numbers, escaped texts, the rung.

Tests ``history.py`` and ``page.py``.
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_api.admin import LedgerEntry, MemoryKind
from plimsoll_api.assessment import (
    DEVICE_SEGMENTS,
    HOST_SEGMENTS,
    Assessment,
    BudgetState,
    Segment,
    SlowGrowth,
    Suspicion,
)
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.roles import PodRole
from plimsoll_api.state import Signal, View
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.history import History, MemoryBand, draw_growth_chart, draw_segment_chart
from plimsoll_sidecar.page import EMPTY_STATE, find_current_rung, render_page

MIB = 1 << 20


def seen(t: float, size: int = 5 * MIB) -> Assessment:
    return Assessment(
        t=t,
        epoch=1,
        warm=True,
        segments={Segment.PYTHON_OBJECTS: size, Segment.SHARED: MIB},
        host=BudgetState(baseline=4 * MIB, unexplained=2 * MIB, consumed_ratio=0.5),
    )


def history(count: int) -> History:
    kept = History()
    for index in range(count):
        kept.add(1000.0 + index, seen(float(index), index * MIB))
    return kept


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(4, 40))
def test_history_is_bounded_and_spans_the_run(count: int, points: int) -> None:
    kept = History(points)
    for index in range(count):
        kept.add(float(index), seen(float(index)))
    times = [point.at for point in kept.read_points()]
    assert times == sorted(times)
    assert len(times) <= points
    assert len(times) >= min(count, points // 2)
    if count:
        assert times[0] == 0.0
        assert times[-1] >= 0.4 * (count - 1)


def test_unknown_stays_unknown_in_the_history() -> None:
    kept = History()
    kept.add(1.0, Assessment(t=1.0, epoch=1, warm=False, segments={Segment.ORPHAN: 0}))
    (point,) = kept.read_points()
    assert point.segments == {Segment.ORPHAN: 0}
    assert point.host_baseline is None


def band(points: int, budget: int | None = 8 * MIB) -> MemoryBand:
    return MemoryBand("Host", HOST_SEGMENTS, (4 * MIB,) * points, budget)


def test_the_chart_is_well_formed_and_says_its_numbers() -> None:
    points = history(50).read_points()
    root = ElementTree.fromstring(draw_segment_chart(band(50), points))
    text = ElementTree.tostring(root, encoding="unicode")
    assert root.attrib["role"] == "img"
    assert "Now 50.0 MiB, the budget ends at 12.0 MiB" in text
    classes = {one.attrib.get("class", "") for one in root.iter()}
    assert {"s s-python_objects", "s s-shared", "baseline", "budget"} <= classes
    for shape in root.iter("polygon"):
        for pair in shape.attrib["points"].split():
            x, y = (float(part) for part in pair.split(","))
            assert 0 <= x <= 760
            assert 0 <= y <= 260


def test_no_chart_without_two_known_points() -> None:
    points = history(50).read_points()
    assert draw_segment_chart(band(1), points[:1]) == ""
    assert (
        draw_segment_chart(MemoryBand("Device", DEVICE_SEGMENTS, (None,) * 50, None), points) == ""
    )
    assert "budget" not in draw_segment_chart(band(50, None), points)


def test_the_growth_alone_is_drawn_against_the_whole_budget() -> None:
    drawn = draw_growth_chart(
        "Host", [(0.0, None), (1.0, 0), (2.0, MIB), (3.0, None), (4.0, 5 * MIB)], 8 * MIB
    )
    root = ElementTree.fromstring(drawn)
    text = ElementTree.tostring(root, encoding="unicode")
    assert "Now 5.0 MiB, the budget is 8.0 MiB" in text
    shapes = [one.attrib["points"].split() for one in root.iter() if one.tag.endswith("polyline")]
    assert [len(points) for points in shapes] == [2], "a lone point is no line; unknown is a gap"
    heights = [float(pair.split(",")[1]) for pair in shapes[0]]
    assert heights[0] > heights[1] > 200, "an eighth of the budget is low in the picture"
    assert draw_growth_chart("Host", [(1.0, None), (2.0, 3)], 8 * MIB) == ""


def test_the_present_rung_is_the_heaviest_of_the_open_incidents() -> None:
    def at(phase: IncidentPhase, rung: Action | None = None) -> Incident:
        return Incident(
            name="x-1",
            kind=IncidentKind.HOST_GROWTH,
            epoch="a:1",
            opened_at=1.0,
            phase=phase,
            rung=rung,
        )

    assert find_current_rung([]) == "No action"
    assert find_current_rung([at(IncidentPhase.OPEN)]) == "No action"
    assert find_current_rung([at(IncidentPhase.TRIMMING)]) == "Trim"
    both = [at(IncidentPhase.TRIMMING), at(IncidentPhase.RESTARTING, Action.WORKER_RESTART)]
    assert find_current_rung(both) == "WorkerRestart"


def state(**changes: object) -> bytes:
    incident = Incident(
        name="x-1", kind=IncidentKind.HOST_GROWTH, epoch="a:1", opened_at=1.0, message="<b>"
    )
    incident.attribution.evidence = ["<script>alert(1)</script>"]
    view = View(
        time=1.0, service="a&b<script>", mode="Observe", engine_state="serving", epoch="a:1",
        assessment=seen(1.0),
        budgets=msgspec.Raw(
            msgspec.json.encode(
                MemoryPolicy(host=MemoryBudget(growth_bytes=8 * MIB, window_s=60.0))
            )
        ),
        open=[incident], recent=[], restarts_left=3, restart_budget_exhausted=False,
        journal_error=None, config_error=None, ladder=[Action.TRIM],
        ledger=[LedgerEntry(owner="<kv>", kind=MemoryKind.DEVICE, bytes=MIB)],
    )  # fmt: skip
    return msgspec.json.encode(msgspec.structs.replace(view, **changes))


def test_what_comes_from_outside_is_escaped() -> None:
    text = render_page(state(journal_error="<disk>"), history(3).read_points()).decode()
    for raw in ("<script>", "<kv>", "<disk>"):
        assert raw not in text
    for part in (
        "a&amp;b&lt;script&gt;",
        "&lt;kv&gt;",
        "&lt;disk&gt;",
        "50%",
        "2.0 MiB of 8.0 MiB",
    ):
        assert part in text
    assert "http-equiv" not in text
    assert 'http-equiv="refresh"' in render_page(state(), [], should_reload=True).decode()
    assert "<script" not in text, "no script at all"
    assert ", role" not in text
    assert ", role Prefill, epoch" in render_page(state(role=PodRole.PREFILL), []).decode()


def test_before_the_first_sample_the_page_says_so() -> None:
    assert b"No sample has been taken yet" in render_page(EMPTY_STATE, [])


def test_the_memory_of_the_history_is_small() -> None:
    kept = history(5000)
    size = sys.getsizeof(kept._times) + sys.getsizeof(kept._values)
    assert size < 64 << 10


def test_a_slow_leak_is_told() -> None:
    leak = SlowGrowth(slow_leak=True, segment=Segment.SHARED, bytes_per_s=4000.0, limit_s=4e5)
    text = render_page(
        state(assessment=msgspec.structs.replace(seen(1.0), slow={"host": leak})), []
    )
    told = b"Slow leak: host memory (shared) grows by 14.0 MiB an hour and reaches its limit in"
    assert told in text
    known = msgspec.structs.replace(seen(1.0), slow={"host": SlowGrowth()})
    assert b"Slow leak" not in render_page(state(assessment=known), [])


def test_damaged_parts_of_the_journal_are_shown_with_what_to_do() -> None:
    text = render_page(state(set_aside=["0001-incidents-<x>.json"]), []).decode()
    assert "0001-incidents-&lt;x&gt;.json" in text
    assert "Delete the files" in text
    assert "set-aside" not in render_page(state(), []).decode()


def test_the_head_says_how_the_replica_is() -> None:
    suspicion = Suspicion(
        kind=IncidentKind.HOST_GROWTH,
        segment=Segment.SHARED,
        confidence=0.8,
        consumed_ratio=0.4,
        process="EngineCore",
        unconfirmed="it may be <garbage>",
    )
    unseen = Signal(ok=False, reason="MetricsMissing", message="Turn the <page> on.")
    text = render_page(
        state(
            assessment=msgspec.structs.replace(seen(1.0), suspicions=[suspicion]),
            signals={"engine": Signal(), "metrics": unseen},
            out_of_service={"manual": 0.0},
            engine_state=None,
        ),
        [],
    ).decode()
    head, _, body = text.partition("<main>")
    for part in (
        "As of 1970-01-0",
        "<dd class='bad'>does not answer</dd>",
        "<dt>Open incidents</dt><dd class='bad'>1</dd>",
        "<dt>Host memory</dt><dd class=''>6.0 MiB</dd>",
        "metrics: MetricsMissing. Turn the &lt;page&gt; on.",
        "The pod is out of service for these reasons: manual.",
    ):
        assert part in head
    assert "Device memory" not in head
    assert "engine: " not in head
    told = (
        "Suspected: HostGrowth of shared in EngineCore, confidence 80%; it may be &lt;garbage&gt;."
    )
    assert told in body
