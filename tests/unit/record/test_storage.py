"""Rows of the journal (``record/storage.py``)."""

from __future__ import annotations

import zlib

from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.detect.detector import Checkpoint
from plimsoll_sidecar.detect.growth import Point
from plimsoll_sidecar.detect.slow_leak import Level, SlowState
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.storage import LastKnownEngine, decode_row, encode_row


def test_a_row_comes_back_as_it_was() -> None:
    incident = Incident(name="pod-1", kind=IncidentKind.HOST_GROWTH, epoch="a:1", opened_at=5.0)
    assert decode_row(*encode_row(incident), Incident) == incident


def test_the_hours_of_slow_growth_come_back() -> None:
    slow = SlowState(
        levels=[[Level(1800.0, 5.0), Level(5400.5, -3.5)], []],
        halves=[None, Level(1.0, 2.0)],
        peaks=[1 << 34],
        raised=True,
    )
    engine = LastKnownEngine(epoch="a:1", checkpoint=Checkpoint(host_slow=slow))
    assert decode_row(*encode_row(engine), LastKnownEngine) == engine


def test_keys_of_older_versions_are_read() -> None:
    body = b'{"epoch":"a:1","remembered":{"host":[{"t":1.0,"bytes":7}]}}'
    engine = decode_row(body, zlib.crc32(body), LastKnownEngine)
    assert engine.checkpoint.host == [Point(1.0, 7)]
    body = b'{"name":"pod-1","kind":"HostGrowth","epoch":"a:1","opened_at":5.0,"doubtful":true}'
    assert decode_row(body, None, Incident).unconfirmed


def test_a_text_that_looks_like_an_old_key_stays() -> None:
    incident = Incident(
        name="pod-1",
        kind=IncidentKind.HOST_GROWTH,
        epoch="a:1",
        opened_at=5.0,
        message='{"doubtful":1}',
    )
    assert decode_row(*encode_row(incident), Incident).message == '{"doubtful":1}'
