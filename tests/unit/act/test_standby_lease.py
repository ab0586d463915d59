"""A lease on the standby worker: renewed, given back, and nobody's trouble.

Tests ``act/standby.py``.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from plimsoll_api.admin import StandbyState, StandbyStatus
from plimsoll_sidecar.act import standby as module
from plimsoll_sidecar.act.standby import LEASE_DURATION_S, StandbyLease
from plimsoll_sidecar.clients.http import EngineError


class Engine:
    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.error: str | None = None
        self.answer = StandbyStatus(StandbyState.ABSENT, "less than 1024 MiB are free")

    def lease_standby(self, epoch: str, lease_s: float) -> StandbyStatus:
        self.asked.append((epoch, lease_s))
        if self.error is not None:
            raise EngineError(self.error)
        return self.answer


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(StandbyLease, "_run_once", lambda self: None)  # the test turns it itself
    return Engine()


def test_it_is_renewed_while_wanted_and_given_back_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    lease = StandbyLease(cast(Any, engine), lambda: 100.0)
    lease.renew_or_release()
    assert engine.asked == []
    lease.set_wanted("a:1", is_wanted=True)
    lease.renew_or_release()
    engine.answer = StandbyStatus(StandbyState.PREPARED)
    for _ in range(2):
        lease.renew_or_release()
    lease.set_wanted("a:1", is_wanted=False)
    for _ in range(3):
        lease.renew_or_release()
    assert engine.asked == [("a:1", LEASE_DURATION_S)] * 3 + [("a:1", 0.0)]
    assert [record.getMessage() for record in caplog.records] == [
        "status of the standby worker: absent: less than 1024 MiB are free",
        "status of the standby worker: prepared",
        "status of the standby worker: the supervisor released the lease",
    ]


def test_a_lease_that_cannot_be_given_back_ends_by_itself(engine: Engine) -> None:
    now = [100.0]
    lease = StandbyLease(cast(Any, engine), lambda: now[0])
    lease.set_wanted("a:1", is_wanted=True)
    lease.renew_or_release()
    engine.error = "no answer"
    lease.set_wanted("a:1", is_wanted=False)
    lease.renew_or_release()
    now[0] += LEASE_DURATION_S - 1
    lease.renew_or_release()
    now[0] += 1
    lease.renew_or_release()
    assert engine.asked == [("a:1", LEASE_DURATION_S), ("a:1", 0.0), ("a:1", 0.0)]


def test_one_whose_epoch_is_over_is_not_given_back(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The restart has used it, and the engine knows no more of that epoch."""
    caplog.set_level(logging.INFO, module.__name__)
    lease = StandbyLease(cast(Any, engine), lambda: 100.0)
    lease.set_wanted("a:1", is_wanted=True)
    lease.renew_or_release()
    lease.set_wanted("a:2", is_wanted=False)
    for _ in range(2):
        lease.renew_or_release()
    assert engine.asked == [("a:1", LEASE_DURATION_S)]
    assert (
        caplog.records[-1].getMessage()
        == "status of the standby worker: the lease ended, because the engine is in another epoch"
    )


def test_one_that_is_refused_is_asked_for_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    lease = StandbyLease(cast(Any, engine), lambda: 100.0)
    engine.error = "HTTP 409 StaleEpoch"
    lease.set_wanted("a:1", is_wanted=True)
    lease.renew_or_release()
    lease.renew_or_release()
    engine.error = None
    lease.set_wanted("a:2", is_wanted=True)
    lease.renew_or_release()
    assert engine.asked == [
        ("a:1", LEASE_DURATION_S),
        ("a:1", LEASE_DURATION_S),
        ("a:2", LEASE_DURATION_S),
    ]
    assert (
        caplog.records[0].getMessage()
        == "status of the standby worker: failed to lease the standby worker: HTTP 409 StaleEpoch"
    )
    assert len(caplog.records) == 2, "the same trouble is told once"
