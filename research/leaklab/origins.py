"""Where the leak budget of a healthy run comes from, in editions that say so.

``docs/tuning.md`` tells users to observe a day of normal traffic and to take three times the level
that they saw. Most do that; some set a budget without a look.
"""

from __future__ import annotations

import random
from enum import StrEnum

OBSERVED_SHARE = 2 / 3
"""Of the runs, those whose budget was set as the page says."""
TIMES_LEVEL = 3.0
"""A budget by how many times the level of the observed day it is, as the page says."""


class Origin(StrEnum):
    """``OBSERVED``: three times what one earlier day showed. ``UNOBSERVED``: set by someone who did
    not follow the page, so that healthy memory takes any share of it."""

    OBSERVED = "observed"
    UNOBSERVED = "unobserved"


def origin_of(seed: int) -> Origin:
    """Of the healthy run with that seed."""
    observed = random.Random(f"origin/{seed}").random() < OBSERVED_SHARE
    return Origin.OBSERVED if observed else Origin.UNOBSERVED
