"""The leak lab with real processes: each fault under real load, beside its real supervisor.

    python -m bench.leaklab                      # all cases: some twenty minutes on two cores
    python -m bench.leaklab --only append_list plain_shared --add   # into the result that is there

Our engine on the CPU with each of its injected faults, and the plain Python engine with mechanisms
of its own. For each case: what was expected, what the supervisor found, when, and what it did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.result import RESULTS, publish
from leaklab.play import Played, plan_of, play
from leaklab.real_cases import ENGINE_CASES, NOT_HERE, PLAIN_CASES, RealCase
from plimsoll_cli.local import model

PLAIN_AT_ONCE, ENGINES_AT_ONCE = 5, 3


async def make_models(root: Path, names: set[str]) -> dict[str, Path]:
    models = {name: root / f"model-{name}" for name in names}
    for name, folder in models.items():
        if name == "tiny":
            await model.generate_tiny_checkpoint(folder)
        else:
            program = [sys.executable, "-m", "plimsoll_faults.models.tiny_media", name, str(folder)]
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


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float | int | None]:
    found = [row for row in rows if row["right"]["kind"]]
    delays = [s for row in found if (s := row["found"]["confirm_s"]) is not None]
    growing = [row for row in found if row["expected"]["segment"]]

    def clients(key: str) -> int:
        return sum(row["clients"].get(key, 0) for row in rows)

    return {
        "cases_count": len(rows),
        "found_count": len(found),
        "cured_count": sum(row["right"]["cured"] for row in rows),
        "segment_cases_count": len(growing),
        "segment_named_count": sum(row["right"]["named"] for row in growing),
        "confirm_p50_s": median(delays) if delays else None,
        "confirm_max_s": max(delays, default=None),
        "requests_count": clients("requests"),
        "requests_failed_count": clients("failed"),
        "streams_count": clients("streams"),
        "streams_broken_count": clients("broken"),
    }


def kept(name: str, played: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the result that is there, but for cases that were played anew: each with the
    commit that it was played with."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return []
    whole = json.loads(file.read_text())
    rows = whole["samples"]["cases"]
    return [{"commit": whole["commit"], **row} for row in rows if row["case"] not in played]


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
    parser.add_argument("--add", action="store_true", help="keep the other cases of the result")
    parser.add_argument("--name", default="leaklab-real", help="of the result")
    arguments = parser.parse_args()
    rows = [one.row() for one in asyncio.run(run(arguments.only))]
    if arguments.add:
        rows += kept(arguments.name, [row["case"] for row in rows])
    rows.sort(key=lambda row: names.index(row["case"]))
    publish(arguments.name, figures(rows), {"cases": rows, "not_here": NOT_HERE})


if __name__ == "__main__":
    main()
