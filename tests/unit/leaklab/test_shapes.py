"""``leaklab/shapes.py``: how leaks grow by the share of their time."""

from __future__ import annotations

import pytest

from leaklab import rhythms
from leaklab.shapes import SHARES

NAMES = ["uneven", "regimes", "adopted", *rhythms.SHARES]


@pytest.mark.parametrize("shape", NAMES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shape_grows_from_nought_to_one_and_on(shape: str, seed: int) -> None:
    share = SHARES[shape](seed)
    path = [share(x / 200) for x in range(251)]
    assert path[0] == 0.0
    assert path[200] == pytest.approx(1.0)
    assert path == sorted(path)
    assert path[250] > 1.0
