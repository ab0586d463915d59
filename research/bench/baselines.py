"""Other ways to decide that an engine leaks, on the same series: when each would have acted.

Each rule sees one series of sizes (bytes, an array over ``t`` in seconds, resampled to 10 s or the
sample interval), the memory limit, and one choice of its parameters. It returns the times at which
it would have restarted the engine; after each it is silent for an hour, as every restart policy in
use has a back-off. Parameters are chosen on the development split by the best F1 score.

Precog is in ``precog.py``, ADWIN in ``adwin.py``. PSI: these runs have no pressure signal, so it is
modelled: anonymous memory without swap is felt as pressure when nothing else is left to reclaim,
shortly before the limit.

LBR follows Jindal et al., "Memory Leak Detection Algorithms in the Cloud-based Infrastructure"
(2021); the usage buckets are adapted from RESIN (Lou et al., OSDI 2022), which compares hosts of a
fleet where we have one replica. Page-Hinkley is Page's test (1954), Mann-Kendall with Theil-Sen's
slope the usual non-parametric trend test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bench import adwin, precog

Array = NDArray[np.float64]
Rule = Callable[[Array, Array, float, Any], Array]

REARM_S = 3600.0
WARMUP_S = 60.0
"""No rule looks at the start of the engine."""
GRID_S = 10.0
MIB = 1 << 20


@dataclass(frozen=True)
class Baseline:
    rule: Rule
    choices: tuple[Any, ...] = (None,)


def alarms(baseline: Baseline, t: Array, x: Array, limit: float, choice: Any) -> list[float]:
    """When the rule would have acted; never in a life with fewer than two points to judge."""
    width = max(1, round(GRID_S / (t[1] - t[0]))) if len(t) > 1 else 1
    late = t >= WARMUP_S
    t, x = t[late][::width], x[late][::width]
    if len(t) < 2:
        return []
    return _rearmed(baseline.rule(t, x, limit, choice))


def _rearmed(times: Array) -> list[float]:
    kept: list[float] = []
    for at in times:
        if not kept or at - kept[-1] >= REARM_S:
            kept.append(float(at))
    return kept


def _above(share: float) -> Rule:
    return lambda t, x, limit, _: t[x > share * limit]


def _pressure(t: Array, x: Array, limit: float, share: float) -> Array:
    return t[x > share * limit]


def _windows(t: Array, x: Array, span: float, points: int) -> tuple[Array, Array, Array]:
    """Times of decision, and for each the ``points`` means of the last ``span`` seconds."""
    step = t[1] - t[0]
    width = max(1, int(span / points / step))
    usable = len(x) // width * width
    if usable // width < points:
        return np.empty(0), np.empty((0, points)), np.arange(points) * step * width
    means = x[:usable].reshape(-1, width).mean(axis=1)
    ends = t[:usable].reshape(-1, width)[:, -1]
    return ends[points - 1 :], sliding_window_view(means, points), np.arange(points) * step * width


def _slope(t: Array, x: Array, limit: float, span: float) -> Array:
    at, rows, axis = _windows(t, x, span, 30)
    centred = axis - axis.mean()
    slopes = rows @ centred / (centred @ centred)
    fires: Array = at[slopes > 10e6 / 3600]
    return fires


def _mann_kendall(t: Array, x: Array, limit: float, choice: tuple[float, float, float]) -> Array:
    span, least_z, least_slope = choice
    n = 20
    at, rows, axis = _windows(t, x, span, n)
    if not len(at):
        return at
    first, second = np.triu_indices(n, 1)
    differences = rows[:, second] - rows[:, first]
    score = np.sign(differences).sum(axis=1)
    z = (score - 1) / np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    slopes = np.median(differences / (axis[second] - axis[first]), axis=1)
    fires: Array = at[(z > least_z) & (slopes > least_slope)]
    return fires


def _page_hinkley(t: Array, x: Array, limit: float, choice: tuple[float, float]) -> Array:
    allowed, threshold = choice[0] * MIB, choice[1] * MIB
    found, mean, count, total, least = [], 0.0, 0, 0.0, 0.0
    for at, size in zip(t, x, strict=True):
        count += 1
        mean += (size - mean) / count
        total += size - mean - allowed
        least = min(least, total)
        if total - least > threshold:
            found.append(at)
            mean, count, total, least = 0.0, 0, 0.0, 0.0
    return np.array(found)


def _periodic(t: Array, x: Array, limit: float, period: float) -> Array:
    turns = np.floor(t / period)
    return t[1:][np.diff(turns) > 0]


def _lbr(t: Array, x: Array, limit: float, choice: tuple[float, float]) -> Array:
    """A line backwards from now, over ever more points, that reaches the limit soon enough."""
    least_r2, horizon = choice
    fires = np.zeros(len(t), dtype=bool)
    # Sums are taken of centred values, or their squares would lose the noise's digits.
    y, s = x - x.mean(), t - t.mean()
    zero = np.zeros(1)
    sums = [np.concatenate((zero, np.cumsum(v))) for v in (s, y, s * s, s * y, y * y)]
    for points in (30, 60, 120, 240, 480):
        if len(t) <= points:
            break
        st, sy, stt, sty, syy = (total[points:] - total[:-points] for total in sums)
        vt, vy = stt - st * st / points, np.maximum(syy - sy * sy / points, 1.0)
        cov = sty - st * sy / points
        slope, r2 = cov / vt, cov * cov / (vt * vy)
        left = (limit - x[points - 1 :]) / np.maximum(slope, 1e-9)
        fires[points - 1 :] |= (slope > 0) & (r2 >= least_r2) & (left <= horizon)
    fired: Array = t[fires]
    return fired


def _buckets(t: Array, x: Array, limit: float, choice: tuple[float, int]) -> Array:
    """Means of buckets that rose all the time, by more than their spread explains."""
    width_s, rising = choice
    width = max(2, int(width_s / (t[1] - t[0])))
    usable = len(x) // width * width
    if usable // width <= rising:
        return np.empty(0)
    rows = x[:usable].reshape(-1, width)
    means, spread = rows.mean(axis=1), rows.std(axis=1)
    window = sliding_window_view(means, rising + 1)
    up = (np.diff(window, axis=1) > 0).all(axis=1)
    enough = window[:, -1] - window[:, 0] > 3 * spread[rising:]
    fires: Array = t[width - 1 : usable : width][rising:][up & enough]
    return fires


BASELINES: dict[str, Baseline] = {
    "rss_80": Baseline(_above(0.8)),
    "rss_90": Baseline(_above(0.9)),
    "psi": Baseline(_pressure, (0.95, 0.97, 0.99)),
    "precog": Baseline(partial(precog.rule, filtered=False), precog.CHOICES),
    "precog_filtered": Baseline(partial(precog.rule, filtered=True), precog.CHOICES),
    "slope_10mb_h": Baseline(_slope, (300.0, 1800.0, 7200.0, 21600.0)),
    "mann_kendall": Baseline(
        _mann_kendall,
        tuple(
            (span, z, slope)
            for span in (300.0, 1800.0, 7200.0)
            for z in (2.33, 3.3, 5.0)
            for slope in (0.0, 10e6 / 3600)
        ),
    ),
    "page_hinkley": Baseline(
        _page_hinkley, tuple((d, h) for d in (5, 20, 60) for h in (500, 2000, 8000))
    ),
    "adwin": Baseline(adwin.rule, adwin.CHOICES),
    "lbr": Baseline(_lbr, tuple((r, h * 3600.0) for r in (0.7, 0.9) for h in (1, 10, 48))),
    "usage_buckets": Baseline(
        _buckets, tuple((w, k) for w in (60.0, 300.0, 1800.0) for k in (4, 6, 9))
    ),
    "periodic_restart": Baseline(_periodic, (3600.0, 6 * 3600.0, 86400.0)),
    "always": Baseline(lambda t, x, limit, _: t),
    "never": Baseline(lambda t, x, limit, _: np.empty(0)),
}
