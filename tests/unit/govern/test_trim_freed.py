"""A trim is judged by the memory that came back; what was not measured is unknown.

Tests ``act/adapters/external_engine.py``.
"""

import os

import pytest

from plimsoll_sidecar.act.adapters.processes import measure_trim_effect, measure_trimmable_bytes
from plimsoll_sidecar.govern.command import Outcome

MIB = 1 << 20
SUCCEEDED, FAILED, UNKNOWN = Outcome.SUCCEEDED, Outcome.FAILED, Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("before", "after", "device", "devices", "outcome"),
    [
        (90 * MIB, 60 * MIB, None, False, SUCCEEDED),
        (90 * MIB, 90 * MIB - 4096, None, False, FAILED),
        (90 * MIB, 95 * MIB, None, False, FAILED),
        (None, 90 * MIB, None, False, UNKNOWN),
        (90 * MIB, 90 * MIB, None, True, UNKNOWN),
        (90 * MIB, 90 * MIB, 0, True, FAILED),
        (90 * MIB, 90 * MIB, 50 * MIB, True, SUCCEEDED),
        (90 * MIB, 60 * MIB, None, True, SUCCEEDED),
    ],
)
def test_outcomes(
    before: int | None, after: int | None, device: int | None, devices: bool, outcome: Outcome
) -> None:
    found = measure_trim_effect(before, after, device, devices)
    assert found.outcome is outcome
    assert ("unknown" in found.summary) == (before is None or (devices and device is None))


def test_what_processes_hold() -> None:
    assert (measure_trimmable_bytes([os.getpid()]) or 0) > MIB
    assert measure_trimmable_bytes([os.getpid(), 2**22 + 1]) is None, "a part of a sum is no sum"
    assert measure_trimmable_bytes([]) is None
