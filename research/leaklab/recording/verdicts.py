"""What the supervisor makes of the recordings that may be looked at.

    python -m leaklab.recording.verdicts
    python -m leaklab.recording.verdicts --drawn    # the others: once, at the end

Each is replayed, and what is confirmed is compared with the labels. It prints a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leaklab.recording.labels import Labels, Leak
from leaklab.recording.published import Recording, recordings
from plimsoll_api.supervision import Action, Mode
from plimsoll_sidecar.replay import ReplayLine, replay

NOT_MEMORY = ("EngineCrash",)
"""Kinds of incidents of what the rig did itself."""


@dataclass(frozen=True)
class Verdict:
    """``confirm_s`` is from the leak's start to its confirmation, None where it was missed.

    ``wrong`` are confirmations of what is in no label, ``suspected`` all that was not confirmed.
    """

    confirm_s: float | None
    segment: str | None
    wrong: tuple[str, ...]
    suspected: tuple[str, ...]

    def told(self, labels: Labels) -> str:
        """Say it in a few words."""
        words = []
        if self.segment is not None:
            words.append(f"confirmed: `{self.segment}`")
        words += [f"**wrongly confirmed**: `{segment}`" for segment in self.wrong]
        words += [f"suspected only: `{segment}`" for segment in self.suspected]
        return ", ".join(words) or ("**missed**" if labels.leaks else "nothing")


def judge(labels: Labels, lines: Iterable[ReplayLine]) -> Verdict:
    """Compare the events of a replay with the labels. Pure."""
    confirm_s: float | None = None
    segment: str | None = None
    wrong: list[str] = []
    suspected: dict[str, str] = {}
    for line in lines:
        name = line.segment or line.kind or ""
        if line.event == "incident" and line.kind not in NOT_MEMORY:
            suspected[line.id] = name
        if line.event != "confirmed":
            continue
        suspected.pop(line.id, None)
        known = [one for one in labels.leaks if one.kind == line.kind and one.start_t <= line.t]
        if not known:
            wrong.append(name)
        elif confirm_s is None:
            confirm_s, segment = round(line.t - known[0].start_t, 1), name
    return Verdict(confirm_s, segment, tuple(wrong), tuple(suspected.values()))


def due(leaks: Iterable[Leak], kind: str | None, t: float) -> bool:
    """Whether a leak of that kind had begun."""
    return any(leak.kind == kind and leak.start_t <= t for leak in leaks)


def false_actions(labels: Labels, lines: Iterable[ReplayLine]) -> int:
    """Restarts and replacements for an incident of which there was no leak yet. Pure."""
    kinds: dict[str, str | None] = {}
    count = 0
    for line in lines:
        if line.kind is not None:
            kinds[line.id] = line.kind
        if line.event == "remediation" and line.action != Action.TRIM.value:
            count += not due(labels.leaks, kinds.get(line.id), line.t)
    return count


def table(chosen: Sequence[Recording]) -> list[str]:
    """Return the lines of the table, in Markdown."""
    rows = ["| Recording | Label | The supervisor | Seconds to confirm |", "|---|---|---|---|"]
    for one in chosen:
        lines = [x for x in replay(one.trace, Mode.RECOVER) if isinstance(x, ReplayLine)]
        verdict = judge(one.labels, lines)
        leak = next(iter(one.labels.leaks), None)
        label = f"{one.about['mechanism']}: `{leak.segment}`" if leak else "healthy"
        seconds = "" if verdict.confirm_s is None else f"{verdict.confirm_s:.0f}"
        rows.append(f"| `{one.name}` | {label} | {verdict.told(one.labels)} | {seconds} |")
    return rows


def main() -> int:
    """Print the table."""
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parse.add_argument("--drawn", action="store_true")
    drawn = parse.parse_args().drawn
    chosen = [one for one in recordings() if one.seen is not drawn]
    sys.stdout.write("\n".join(table(chosen)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
