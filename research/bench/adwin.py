"""ADWIN: the mean of a window that shrinks when its two ends differ too much to be chance.

After Bifet and Gavaldà, "Learning from Time-Varying Data with Adaptive Windowing" (2007), as in the
library ``river``. It tells that the mean changed; a leak is a change after which it is higher. Its
bound is for values between 0 and 1, so the unit in which it sees the sizes is a parameter too.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MIB = 1 << 20
CHOICES = tuple(product((2e-3, 1e-4, 1e-6), (64.0, 256.0, 1024.0, 2048.0, 6144.0), (1, 32)))
"""The significance, the unit in MiB, and every how many points it looks; 2e-3 and 32 are the
library's own."""


def rule(t: Array, x: Array, limit: float, choice: tuple[float, float, int]) -> Array:
    """The times at which the mean had risen."""
    # The library brings scipy, which takes seconds to import.
    from river.drift import ADWIN

    delta, unit, clock = choice
    window, found, before = ADWIN(delta=delta, clock=clock), [], 0.0
    for at, size in zip(t.tolist(), (x / (unit * MIB)).tolist(), strict=True):
        window.update(size)
        mean = window.estimation
        if window.drift_detected and mean > before:
            found.append(at)
        before = mean
    return np.array(found)
