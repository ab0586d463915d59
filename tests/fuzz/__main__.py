"""Fuzz one parser for some time, guided by the coverage of our code and of pure-Python libraries.

    python -m tests.fuzz chat --seconds 60
    python -m tests.fuzz chat --seconds 600 --keep     # what is new and small joins the corpus

The exit status is 0 where nothing was found. An input that a parser fails on is kept in
``fuzz-findings/NAME`` with its traceback; ``python -m tests.fuzz NAME FILE`` runs it again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import targets
from tests.fuzz.watched import watch

FINDINGS = Path("fuzz-findings")
MAX_INPUT_BYTES = 16 << 10
"""Longer inputs are slow to mutate; size has inputs of its own (``Target.large``)."""
KEPT_BYTES, KEPT_INPUT_BYTES = 8 << 10, 1 << 10
"""Of a target's corpus, and of one of its inputs that the fuzzer made."""
INSTRUMENTED = [
    "plimsoll_api", "plimsoll_engine", "plimsoll_sidecar", "plimsoll_operator", "PIL",
    "python_multipart", "multipart", "starlette.formparsers", "jinja2",
]  # fmt: skip
HANG_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("name", choices=sorted(targets.NAMES))
    parser.add_argument("file", nargs="?", type=Path, help="an input to run once")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="add to the corpus what is new")
    parser.add_argument("--models", type=Path, help="folder of tiny checkpoints, made if absent")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.found is not None:
        _fuzz(given.name, given.models, given.found, given.seconds)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        models = given.models or Path(temporary) / "models"
        models.mkdir(parents=True, exist_ok=True)
        if given.file is not None:
            watch(targets.load(given.name, models), given.file.read_bytes())
            return 0
        found = Path(temporary) / "found"
        found.mkdir()
        command = [
            sys.executable, "-m", "tests.fuzz", given.name, "--seconds", str(given.seconds),
            "--models", str(models), "--found", str(found),
        ]  # fmt: skip
        code = subprocess.run(command).returncode
        if given.keep:
            _keep(given.name, found)
        return code


def _fuzz(name: str, models: Path, found: Path, seconds: int) -> None:
    """Never returns: the library ends the process with its verdict."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        target = targets.load(name, models)
    kept = targets.CORPUS / name
    findings = FINDINGS / name
    findings.mkdir(parents=True, exist_ok=True)
    words = found.with_name("words")
    words.write_text("".join(f'"{_quoted(word)}"\n' for word in target.words))
    options = [
        f"-max_total_time={seconds}", f"-dict={words}", f"-max_len={MAX_INPUT_BYTES}",
        f"-artifact_prefix={findings}/", f"-timeout={HANG_S}", "-rss_limit_mb=4096",
        "-print_final_stats=1", "-close_fd_mask=0", "-verbosity=1",
    ]  # fmt: skip
    folders = [str(found), *([str(kept)] if kept.is_dir() else [])]
    atheris.Setup([name, *options, *folders], lambda data: watch(target, data))
    atheris.Fuzz()
    os._exit(0)


def _quoted(word: str) -> str:
    """As libFuzzer's dictionaries have it."""
    plain = (c if c.isascii() and c.isprintable() and c not in '"\\' else None for c in word)
    return "".join(c or f"\\x{ord(o):02x}" for c, o in zip(plain, word, strict=True))


def _keep(name: str, found: Path) -> None:
    """The smallest of what the fuzzer found, up to the size that a corpus may have."""
    kept = targets.CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    size = sum(file.stat().st_size for file in kept.iterdir())
    for file in sorted(found.iterdir(), key=lambda one: one.stat().st_size):
        content = file.read_bytes()
        if len(content) > KEPT_INPUT_BYTES or size + len(content) > KEPT_BYTES:
            return
        (kept / file.name).write_bytes(content)
        size += len(content)


if __name__ == "__main__":
    sys.exit(main())
