"""What does the growth of the other replicas do to the stated chance of a leak?

    python -m bench.peers            # writes research/bench/results/peers.json
    python -m bench.peers --quick    # a smoke test, nothing is written

Services of four replicas run for two hours in virtual time, each replica with a detector of its
own. What the operator would publish is a minute or two old. Replicas differ in their noise, and by
up to 20 % in load and rate. Each minute in which the first replica is suspected counts, with the
chance that its supervisor states with the other replicas and without them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean

from bench.result import publish
from leaklab.cases import WARMUP_S
from leaklab.series import DAY, HOUR, LIMIT, MIB, Curve, Series, saturating, steady
from plimsoll_api.assessment import Assessment
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.peers import Peer, PeerGrowth
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.detect.fleet import add_peer_evidence

POLICY = MemoryPolicy(host=MemoryBudget(512 * MIB, DAY, LIMIT), warmup_s=WARMUP_S)
REPLICAS, SEEDS = 4, 12
LASTS_S, INTERVAL_S, ROUND_DURATION_S = 2 * HOUR, 5.0, 60
HEAD_S = HOUR
"""How much older the replicas are that a roll-out has not replaced yet."""


@dataclass(frozen=True)
class Found:
    """One service: mean chances of the first replica while it was suspected."""

    kind: str
    seed: int
    minutes: int
    alone: float
    with_peers: float


@dataclass(frozen=True)
class Kind:
    """A cause of growth. Replicas from number ``ends`` on do not have it.

    Those from number ``new`` on are of an older revision.
    """

    growth: Callable[[random.Random], Callable[[float], Curve]]
    leaks: bool = False
    ends: int = REPLICAS
    new: int = REPLICAS


def _leak(dice: random.Random) -> Callable[[float], Curve]:
    rate, start = dice.uniform(60, 400) * MIB / HOUR, dice.uniform(120, 2400)
    return lambda factor: steady(rate * factor, start)


def _cache(dice: random.Random) -> Callable[[float], Curve]:
    height, tau = dice.uniform(150, 450) * MIB, dice.uniform(600, 3000)
    return lambda factor: saturating(height * factor, tau, 120.0)


def _work(dice: random.Random) -> Callable[[float], Curve]:
    """Memory that something takes evenly for some time, and then no more."""
    height = dice.uniform(150, 450) * MIB
    start, lasts = dice.uniform(600, 2400), dice.uniform(600, 3000)
    return lambda factor: lambda t: height * factor * min(1.0, max(0.0, (t - start) / lasts))


KINDS = {
    "leak_of_one": Kind(_leak, leaks=True, ends=1),
    "leak_of_all": Kind(_leak, leaks=True),
    "leak_of_new_revision": Kind(_leak, leaks=True, ends=2, new=2),
    "cache_of_all": Kind(_cache),
    "work_of_all": Kind(_work),
    "work_of_one": Kind(_work, ends=1),
}


class Replica:
    """An engine with its detector. ``head_s`` is how long it has run at the begin."""

    def __init__(self, number: int, kind: Kind, curve: Curve | None, dice: random.Random) -> None:
        old = number >= kind.new
        self.head_s = HEAD_S if old else 0.0
        series = Series(
            duration=LASTS_S + self.head_s,
            interval=INTERVAL_S,
            noise=25 * MIB,
            requests_per_s=5 * dice.uniform(0.8, 1.2),
            seed=dice.randrange(1 << 30),
        )
        if curve is not None and kind.leaks:
            series.leak = curve
        elif curve is not None:
            series.other = curve
        self._pod, self._revision = f"pod-{number}", "old" if old else "new"
        self._samples = iter(series.samples())
        self._detector = Detector(POLICY, 30.0, INTERVAL_S)
        self.seen: Assessment | None = None

    def run(self, seconds: float) -> Peer:
        """Go on for so long; what the operator learns of it at the end."""
        for _ in range(round(seconds / INTERVAL_S)):
            self.seen = self._detector.update(next(self._samples))
        host = self.seen.host if self.seen else None
        grown = None
        if host and None not in (known := (host.unexplained, host.age_s, host.requests)):
            grown = PeerGrowth(*(int(value) for value in known if value is not None))
        return Peer(self._pod, self._revision, host=grown)


def judged(name: str, seed: int) -> Found | None:
    """Run one service; None if its first replica was never suspected beside known peers."""
    kind, dice = KINDS[name], random.Random(f"{name} {seed}")
    curve = kind.growth(dice)
    replicas = [
        Replica(n, kind, curve(dice.uniform(0.8, 1.2)) if n < kind.ends else None, dice)
        for n in range(REPLICAS)
    ]
    for one in replicas:
        one.run(one.head_s)
    published: list[Peer] = []
    alone: list[float] = []
    compared: list[float] = []
    for _ in range(round(LASTS_S / ROUND_DURATION_S) - 1):
        now = [one.run(ROUND_DURATION_S) for one in replicas]
        seen = replicas[0].seen
        if seen is not None:
            after = add_peer_evidence(seen, "pod-0", published).suspicions
            for plain, told in zip(seen.suspicions, after, strict=True):
                if told != plain:
                    alone.append(plain.confidence)
                    compared.append(told.confidence)
        published = now
    if not alone:
        return None
    return Found(name, seed, len(alone), fmean(alone), fmean(compared))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one service each, nothing is written")
    options = parser.parse_args()
    figures: dict[str, float | int | None] = {}
    found: list[Found] = []
    for name in KINDS:
        runs = [judged(name, seed) for seed in range(1 if options.quick else SEEDS)]
        known = [one for one in runs if one is not None]
        found += known
        figures[f"{name}_services_count"] = len(known)
        if known:
            figures[f"{name}_chance_alone_ratio"] = round(fmean(o.alone for o in known), 3)
            figures[f"{name}_chance_with_peers_ratio"] = round(
                fmean(o.with_peers for o in known), 3
            )
    if options.quick:
        for key, value in figures.items():
            print(f"{key:45} {value}")
        return
    publish("peers", figures, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
