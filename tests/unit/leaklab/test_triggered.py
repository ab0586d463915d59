"""``leaklab/triggered.py``: how the totals vary that trigger a leak."""

from __future__ import annotations

import random

import pytest

from leaklab.triggered import VARYING, Vary

WAYS = [one for ways in VARYING.values() for one in ways]


@pytest.mark.parametrize("varying", WAYS, ids=lambda way: way.__name__)
def test_a_way_to_vary_keeps_its_rate_about(varying: Vary) -> None:
    """Of many totals: one alone may be twice as much, or half."""
    length = 5000.0
    totals = [varying(0.4, length, random.Random(seed)) for seed in range(60)]
    mean = sum(total(length) for total in totals) / len(totals)
    assert 0.75 < mean / (0.4 * length) < 1.33
    for total in totals:
        path = [total(length * part / 50) for part in range(51)]
        assert path[0] == 0.0
        assert path == sorted(path)
