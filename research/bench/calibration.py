"""Is growth that the supervisor suspects with a confidence of 70 % a leak in 70 of 100 cases?

Each suspicion counts twice: with the confidence that was stated when its incident opened, and with
the last that was stated before the incident was confirmed or had ended, or the run had. It was true
if a leak of its kind had begun by then. Only growth counts: an incident without a budget, such as a
stall, states a confidence of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.detection_score import wilson
from leaklab.cases import Case
from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.replay import ReplayLine

GROWTH = (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH)
BINS = 10
DECIDED = ("confirmed", "cleared", "ended", "still-open")


@dataclass(frozen=True)
class Claim:
    """A stated confidence, and whether it was about a leak."""

    confidence: float
    true: bool


@dataclass
class Stated:
    """What was said of one suspicion; ``last`` is None if the run was judged no further."""

    case: str
    kind: str
    opened: Claim
    last: Claim | None = None
    end: str | None = None


@dataclass
class Listener:
    """Hears the events of one run."""

    case: Case
    stated: dict[str, Stated] = field(default_factory=dict)

    def hear(self, line: ReplayLine) -> None:
        if line.confidence is None or line.kind not in GROWTH:
            return
        claim = Claim(line.confidence, self._true(line))
        if line.event == "incident":
            self.stated[line.id] = Stated(self.case.name, line.kind, claim)
            return
        known = self.stated.get(line.id)
        if known is not None and known.last is None and line.event in DECIDED:
            known.last, known.end = claim, line.event

    def _true(self, line: ReplayLine) -> bool:
        began = self.case.starts is not None and line.t >= self.case.starts
        return began and line.kind == self.case.kind


@dataclass(frozen=True)
class Bin:
    """Claims of about the same confidence: their mean, and how many were true."""

    low: float
    high: float
    count: int
    true: int
    mean: float

    @property
    def share(self) -> float:
        return self.true / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share (Wilson)."""
        return wilson(self.true, self.count) or (0.0, 1.0)


def bins(claims: Iterable[Claim]) -> list[Bin]:
    """Ten bins of equal width, without those that are empty."""
    filled: dict[int, list[Claim]] = {}
    for claim in claims:
        filled.setdefault(min(BINS - 1, int(claim.confidence * BINS)), []).append(claim)
    return [
        Bin(
            number / BINS,
            (number + 1) / BINS,
            len(held),
            sum(one.true for one in held),
            sum(one.confidence for one in held) / len(held),
        )
        for number, held in sorted(filled.items())
    ]


def expected_error(claims: Sequence[Claim]) -> float | None:
    """The expected calibration error (Naeini et al. 2015); None of nothing.

    It is the mean distance of stated and true, over the bins by their counts.
    """
    if not claims:
        return None
    return sum(abs(one.true - one.count * one.mean) for one in bins(claims)) / len(claims)


def opened(stated: Iterable[Stated]) -> list[Claim]:
    return [one.opened for one in stated]


def last(stated: Iterable[Stated]) -> list[Claim]:
    return [one.last for one in stated if one.last is not None]


def confirmed(stated: Iterable[Stated]) -> list[Claim]:
    """The last claims of those that were confirmed."""
    return [one.last for one in stated if one.last is not None and one.end == "confirmed"]


def table(stated: Sequence[Stated]) -> dict[str, list[dict[str, float | int]]]:
    """The bins of the plot, as a result publishes them."""
    return {
        name: [
            {
                "low": one.low, "high": one.high, "count": one.count, "true": one.true,
                "stated_ratio": round(one.mean, 4), "true_ratio": round(one.share, 4),
                "true_ratio_low": round(one.interval[0], 4),
                "true_ratio_high": round(one.interval[1], 4),
            }
            for one in bins(claims)
        ]
        for name, claims in (("opened", opened(stated)), ("last", last(stated)))
    }  # fmt: skip


def figures(stated: Sequence[Stated]) -> dict[str, float | int | None]:
    """The figures of ``detection.json``; those without a prefix are of the last claims."""
    told: dict[str, float | int | None] = {}
    for name, claims in (
        ("", last(stated)),
        ("opened_", opened(stated)),
        ("confirmed_", confirmed(stated)),
    ):
        told[f"calibration_{name}ece_ratio"] = expected_error(claims)
        told[f"calibration_{name}suspicions_count"] = len(claims)
        told[f"calibration_{name}true_ratio"] = (
            sum(one.true for one in claims) / len(claims) if claims else None
        )
        told[f"calibration_{name}stated_ratio"] = (
            sum(one.confidence for one in claims) / len(claims) if claims else None
        )
    return told
