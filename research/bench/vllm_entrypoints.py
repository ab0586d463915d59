"""vLLM's own tests of its OpenAI server, unchanged, against our engine on the CPU.

    python -m bench.vllm_entrypoints [--source FOLDER]

FOLDER is vLLM's source at the version that ``make engines`` installs, by default
``vllm-VERSION-source`` beside the engines, which PyPI's archive fills. Its tests run in that
version's environment, with :mod:`tests.conformance.entrypoints_plugin` in the place of its server.
``make generate`` makes the list in ``docs/design/vllm-tests.md`` from
``research/bench/results/vllm-entrypoints.json``.

A test that neither passes nor is skipped needs a line in
:mod:`tests.conformance.entrypoints_verdicts`, which says why; without one it counts as unexplained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

from bench.result import publish
from tests.conformance import entrypoints_model
from tests.conformance.chat_templates import fetched
from tests.conformance.entrypoints_verdicts import (
    FAILED,
    LEFT_OUT,
    NOT,
    NOT_BUILT,
    SUITES,
    Row,
    verdict,
)
from tests.conformance.peers import FOLDER, PEERS
from tests.conformance.published import SMOLLM2
from tests.lora import write_adapter

NAME = "vllm-entrypoints"
PEER = PEERS["vllm-0.32.0"]
SOURCE = FOLDER / f"{PEER.name}-source"
PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "tblib")
ROOT = Path(__file__).resolve().parents[2]
SUITE_TIMEOUT_S = 7200
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_TOKENS = 128
"""Most tokens of a chat that has no limit. SmolLM2 writes some 20 a second on two cores."""
TEST_TIMEOUT_S = 180
"""A test that fails may leave a task behind that its own loop then waits for."""


def run(source: Path, chosen: list[str], smollm2: bool) -> dict[str, dict[str, str]]:
    """Return the outcome of each test of the suites, or of the ``chosen`` files."""
    packages = FOLDER / "entrypoints-packages-2"
    if not packages.exists():
        pip = [sys.executable, "-m", "pip", "--python", str(PEER.python), "install", "--no-deps"]
        needed = [*PACKAGES, "iniconfig", "packaging", "pluggy", "pygments"]
        subprocess.run([*pip, "--quiet", "--target", str(packages), *needed], check=True)
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint, adapter = folder / "tiny", folder / "adapter"
        if smollm2:
            shutil.copytree(SMOLLM2, checkpoint)
            generation = checkpoint / "generation_config.json"
            limit = {"max_new_tokens": SMOLLM2_TOKENS}
            generation.write_text(json.dumps(json.loads(generation.read_bytes()) | limit))
        else:
            entrypoints_model.write(checkpoint)
        write_adapter(adapter, checkpoint, gain=0.05)
        outcomes = folder / "outcomes.json"
        setting = {
            "python": sys.executable,
            "modules": os.pathsep.join(sys.path),
            "source": str(source),
            "checkpoint": str(checkpoint),
            "adapter": str(adapter),
            "outcomes": str(outcomes),
        }
        environment = os.environ | PEER.environment | {
            "PLIMSOLL_ENTRYPOINTS": json.dumps(setting),
            # The archive's own metadata, which pytest puts first, has no "cpu" in its version.
            # vLLM then imports kernels for AVX-512 on any CPU.
            "VLLM_TARGET_DEVICE": "cpu",
            "PYTHONPATH": f"{packages}:{ROOT / 'tests' / 'conformance'}",
        }  # fmt: skip
        for suite, files in SUITES.items():
            tests = source / "tests" / suite
            asked = [str(tests / file) for file in files]
            if chosen:
                asked = [str(tests / one) for one in chosen if (tests / one).exists()]
            if not asked:
                continue
            outcomes.write_text("{}")
            subprocess.run(
                [
                    str(PEER.python), "-m", "pytest", "-q", "--tb=no",
                    "-p", "entrypoints_plugin", "-p", "no:cacheprovider", "--asyncio-mode=strict",
                    f"--timeout={TEST_TIMEOUT_S}",
                    f"--rootdir={source}", f"--confcutdir={tests}",
                    "--continue-on-collection-errors",
                    *(f"--ignore={tests / one}" for one in LEFT_OUT),
                    *(f"--deselect=tests/{suite}/{one}" for one in NOT_BUILT),
                    *asked,
                ],
                env=environment, cwd=folder, timeout=SUITE_TIMEOUT_S, check=False,
            )  # fmt: skip
            found |= json.loads(outcomes.read_text())
    return found


def fetch(into: Path) -> None:
    """Unpack vLLM's source archive, which PyPI has."""
    with tempfile.TemporaryDirectory(dir=into.parent) as name:
        with tarfile.open(fetched(f"vllm=={PEER.version}")) as archive:
            archive.extractall(name, filter="data")
        shutil.move(Path(name) / f"vllm-{PEER.version}", into)


def left_out() -> list[Row]:
    """Return the rows of the tests that are not run."""
    return [
        *(Row(file, NOT, why) for file, why in LEFT_OUT.items()),
        *(Row(test, FAILED, why) for test, why in NOT_BUILT.items()),
    ]


def rows_of(outcomes: dict[str, dict[str, str]], smollm2: bool) -> list[Row]:
    """Return what each outcome says about our engine."""
    found = left_out()
    for test, told in outcomes.items():
        name = test.partition("tests/")[2].removeprefix("entrypoints/")
        found.append(verdict(name, told["outcome"], told["why"], smollm2))
    return sorted(found)


def figures(rows: list[Row]) -> dict[str, int]:
    """Return how many tests there are of each verdict."""
    counts = Counter(row.verdict for row in rows)
    names = ("passed", NOT, "failed", "unexplained")
    return {f"{name.replace(' ', '_')}_count": counts[name] for name in names}


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--source", type=Path, default=SOURCE)
    parse.add_argument("--quick", action="store_true", help="nothing is written")
    parse.add_argument("--smollm2", action="store_true", help="with SmolLM2, not the tiny model")
    parse.add_argument("file", nargs="*", help="of a suite; all of them by default")
    options = parse.parse_args()
    if options.source == SOURCE and not SOURCE.exists():
        fetch(SOURCE)
    if not (options.source / "tests" / "entrypoints").is_dir():
        parse.error(f"--source {options.source}: not a checkout of vLLM")
    outcomes = run(options.source.resolve(), options.file, options.smollm2)
    rows = rows_of(outcomes, options.smollm2)
    unexplained = [row for row in rows if row.verdict == "unexplained"]
    for row in unexplained:
        print(row)
    counts = figures(rows)
    print(counts)
    if options.quick or options.file:
        return 0
    tests = [row._asdict() for row in rows]
    model = SMOLLM2_NAME if options.smollm2 else "tiny"
    publish(NAME, counts, {"vllm": PEER.version, "model": model, "tests": tests})
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
