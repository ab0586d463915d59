"""The kept corpus and the large inputs: whatever a fuzzer ever found stays found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import targets
from tests.fuzz.watched import Bounds, Target, TooLargeError, TooSlow, watch

CORPUS_BYTES = 200 << 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    targets.make_models(folder)
    return folder


@pytest.mark.parametrize("name", sorted(targets.NAMES))
def test_inputs_of_the_corpus(name: str, folder: Path) -> None:
    target = targets.load(name, folder)
    inputs = sorted((targets.CORPUS / name).iterdir())
    assert len(inputs) >= 1

    failures = [f"{one}: {found}" for one in inputs if (found := _failure(target, one))]
    assert failures == []


@pytest.mark.parametrize("name", sorted(targets.NAMES))
def test_large_inputs(name: str, folder: Path) -> None:
    target = targets.load(name, folder)
    watch(target, b"")

    failures = [
        f"large input {number} ({data[:40]!r}…): {found}"
        for number, data in enumerate(target.large())
        if (found := _failure(target, data))
    ]
    assert failures == []


def _failure(target: Target, given: Path | bytes) -> str | None:
    try:
        watch(target, given.read_bytes() if isinstance(given, Path) else given)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    return None


def test_the_corpus_is_small() -> None:
    files = [file for file in targets.CORPUS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= CORPUS_BYTES
    assert {file.parent.name for file in files} == set(targets.NAMES)


def test_a_slow_parser_is_seen() -> None:
    def spin(data: bytes) -> None:
        for _ in range(1 << 22):
            pass

    with pytest.raises(TooSlow):
        watch(Target(spin, bounds=Bounds(cpu_s=0.001)), b"")


def test_a_greedy_parser_is_seen() -> None:
    def hold(data: bytes) -> None:
        len(b"\1" * (1 << 30))

    with pytest.raises(TooLargeError):
        watch(Target(hold, bounds=Bounds(cpu_s=60)), b"")
