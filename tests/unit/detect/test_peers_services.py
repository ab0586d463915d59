"""Services of four replicas, each with a detector: the shift has the right direction.

Tests ``bench/peers.py`` and ``detect/fleet.py``.
"""

from __future__ import annotations

import pytest

from bench.peers import judged


@pytest.mark.parametrize(
    ("kind", "rises"),
    [
        ("leak_of_one", True),
        ("leak_of_new_revision", True),
        ("leak_of_all", False),
        ("cache_of_all", False),
    ],
)
def test_the_chance_moves_to_where_the_scope_points(kind: str, rises: bool) -> None:
    found = judged(kind, 1)
    assert found is not None
    assert found.minutes >= 5
    assert (found.with_peers > found.alone) is rises
