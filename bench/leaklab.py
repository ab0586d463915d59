"""The leak lab with real processes: each fault under real load, beside its real supervisor.

    python bench/leaklab.py                      # all cases: some twenty minutes on two cores
    python bench/leaklab.py --only append_list plain_shared

Our engine on the CPU with each of its injected faults, and the plain Python engine with mechanisms
of its own. For each case: what was expected, what the supervisor found, when, and what it did.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from result import publish

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the leak lab is part of the tests

from plimsoll_cli.local import model
from tests.leaklab.play import Played, plan_of, play
from tests.leaklab.real_cases import ENGINE_CASES, NOT_HERE, PLAIN_CASES, RealCase

PLAIN_AT_ONCE, ENGINES_AT_ONCE = 5, 2


async def make_models(root: Path, names: set[str]) -> dict[str, Path]:
    models = {name: root / f"model-{name}" for name in names}
    for name, folder in models.items():
        if name == "tiny":
            await model.make_tiny(folder)
        else:
            program = [sys.executable, "-m", "plimsoll_engine.models.tiny_media", name, str(folder)]
            await asyncio.to_thread(subprocess.run, program, check=True, timeout=120)
    return models


async def play_all(
    cases: Sequence[RealCase], root: Path, models: dict[str, Path], plain: bool, at_once: int
) -> list[Played]:
    limit = asyncio.Semaphore(at_once)

    async def one(case: RealCase) -> Played:
        async with limit:
            made = plan_of(case, root / case.name, models, plain)
            played = await play(case, made, plain)
        row = played.row()
        print(row["case"], row["right"], row["found"], row["clients"], row["troubles"], flush=True)
        return played

    return await asyncio.gather(*(one(case) for case in cases))


def figures(played: Sequence[Played]) -> dict[str, float | int | None]:
    found = [one for one in played if one.found]
    delays = [one.incident.confirmed_at - one.began for one in found if one.incident is not None
              and one.incident.confirmed_at is not None]  # fmt: skip
    growing = [one for one in found if one.case.segment is not None]
    return {
        "cases_count": len(played),
        "found_count": len(found),
        "cured_count": sum(one.cured for one in played),
        "segment_cases_count": len(growing),
        "segment_named_count": sum(one.named for one in growing),
        "confirm_p50_s": median(delays) if delays else None,
        "confirm_max_s": max(delays, default=None),
        "requests_count": sum(one.told.requests for one in played),
        "requests_failed_count": sum(one.told.failed for one in played),
        "streams_count": sum(one.told.streams for one in played),
        "streams_broken_count": sum(one.told.broken for one in played),
    }


async def run(only: Sequence[str]) -> list[Played]:
    engines = [case for case in ENGINE_CASES if not only or case.name in only]
    plains = [case for case in PLAIN_CASES if not only or case.name in only]
    # Short: names of Unix sockets have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        root = Path(folder)
        models = await make_models(root, {case.model for case in engines})
        played = await play_all(plains, root, models, True, PLAIN_AT_ONCE)
        return played + await play_all(engines, root, models, False, ENGINES_AT_ONCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [case.name for case in (*ENGINE_CASES, *PLAIN_CASES)]
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="CASE")
    parser.add_argument("--name", default="leaklab-real", help="of the result")
    arguments = parser.parse_args()
    played = asyncio.run(run(arguments.only))
    rows = [one.row() for one in played]
    publish(arguments.name, figures(played), {"cases": rows, "not_here": NOT_HERE})


if __name__ == "__main__":
    main()
