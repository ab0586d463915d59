r"""Makes recordings: all that are named at once, on one machine.

    python -m leaklab.recording --out FOLDER --prefix h200 --device cuda \
        --peers vllm-0.24.0-cuda --seconds 420 --runs vllm-01 vllm-02 plimsoll-01
    python -m leaklab.recording --out FOLDER --prefix cpu --peers vllm-0.32.0 --at-once 2

Each recording is three files in FOLDER: PREFIX-RUN.jsonl.gz, its labels, and how it was made. Work
and logs are in FOLDER/work. The runs are made in the order of ``--runs``. Without that flag all are
made that the device and the peers allow.
Engines that run at the same time on one device share it: their recordings say so, and only what
the engine's own allocator holds is judged. With ``--at-once 1`` an engine has the device alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from leaklab.recording import adapters, engines, recorded_run
from leaklab.recording.engines import Place
from leaklab.recording.loads import ADAPTERS
from leaklab.recording.run import Run
from leaklab.recording.runs import RUNS
from plimsoll_api.engines import EngineType
from plimsoll_cli.figures import describe_machine, find_commit
from plimsoll_cli.local import model
from tests.conformance.peers import CHECKPOINT, ON_DEVICE, PEERS, Peer

ALL_PEERS = PEERS | ON_DEVICE


def main() -> int:
    """Make the recordings; return how many could not be made."""
    flags = _parser().parse_args()
    peers = {ALL_PEERS[name].type: ALL_PEERS[name] for name in flags.peers}
    runs = [run for run in RUNS if _possible(run, peers, flags.device)]
    if flags.runs:
        runs = [run for name in flags.runs for run in runs if run.name == name]
    if not runs:
        sys.stderr.write("none of the runs is possible: name their engines with --peers\n")
        return 2
    flags.out.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": describe_machine(),
        "commit": find_commit(),
        "at_once": min(flags.at_once, len(runs)),
        "budget_bytes": engines.BUDGET.growth_bytes,
    }
    return asyncio.run(_make_all(runs, flags, peers, about))


def _parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [run.name for run in RUNS]
    parse.add_argument("--out", type=Path, required=True)
    parse.add_argument("--prefix", required=True, help="of the files: the machine's kind")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--peers", nargs="*", choices=list(ALL_PEERS), default=[], metavar="PEER")
    parse.add_argument("--runs", nargs="+", choices=names, default=[], metavar="RUN")
    parse.add_argument(
        "--seconds", type=float, default=420.0, help="of each recording, where its run says nothing"
    )
    parse.add_argument("--at-once", type=int, default=len(RUNS), help="engines, at most")
    return parse


def _possible(run: Run, peers: dict[EngineType, Peer], device: str) -> bool:
    known = run.engine in peers or not recorded_run.needs_peer(run)
    return known and (device != "cpu" or not run.device)


async def _make_all(
    runs: Sequence[Run],
    flags: argparse.Namespace,
    peers: dict[EngineType, Peer],
    about: dict[str, object],
) -> int:
    work = flags.out.resolve() / "work"
    inside, models = work / "inside", work / "models"
    inside.mkdir(parents=True, exist_ok=True)
    engines.install(inside)
    await _models({run.model for run in runs if not recorded_run.needs_peer(run)}, models)
    with_adapters = any("--enable-lora" in run.flags for run in runs)
    folders = adapters.write(work / "adapters", CHECKPOINT, ADAPTERS) if with_adapters else []
    limit, failed = asyncio.Semaphore(flags.at_once), 0
    shared = flags.device != "cpu" and min(flags.at_once, len(runs)) > 1

    async def one(run: Run) -> None:
        nonlocal failed
        out = flags.out / f"{flags.prefix}-{run.name}.jsonl.gz"
        place = Place(work / run.name, flags.device, shared, inside, models)
        async with limit:
            try:
                made = await recorded_run.make(
                    run, place, peers.get(run.engine), out, run.seconds or flags.seconds, folders
                )
            except Exception:  # noqa: BLE001 - the other recordings go on
                failed += 1
                sys.stderr.write(f"{run.name}: {traceback.format_exc()}\n")
                return
        path = out.with_name(out.name.replace(".jsonl.gz", ".run.json"))
        path.write_text(json.dumps(made | about, indent=1) + "\n")
        told = ("ready_s", "samples", "unanswered_samples", "clients", "machine_busy_ratio")
        print(run.name, {key: made[key] for key in told}, made["last_error"][:200], flush=True)

    await asyncio.gather(*(one(run) for run in runs))
    return failed


async def _models(names: set[str], folder: Path) -> None:
    for name in names:
        where = folder / name
        if (where / "config.json").exists():
            continue
        if name == "tiny":
            await model.generate_tiny_checkpoint(where)
            continue
        program = (sys.executable, "-m", "plimsoll_faults.models.tiny_media", name, str(where))
        process = await asyncio.create_subprocess_exec(*program)
        if await process.wait() != 0:
            raise RuntimeError(f"the model {name} cannot be made")


if __name__ == "__main__":
    sys.exit(main())
