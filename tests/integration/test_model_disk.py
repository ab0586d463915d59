"""A download onto a volume that is full or read-only, by the real command onto a real tmpfs: one
line names the folder and the cure, and half of a checkpoint is never taken for a whole one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from plimsoll_engine.download.target import read_complete_version
from tests.integration import test_model_download as of_hub
from tests.integration import test_model_s3 as of_s3
from tests.integration.test_model_download import hub
from tests.integration.test_model_s3 import BUCKET, Store, store
from tests.integration.volume import Volume, volume

__all__ = ["hub", "store"]
AWAY = "http://127.0.0.1:9"
KIB = 1 << 10
LEFT = 64 * KIB
"""Room for the small files and the beginning of the weights."""


@dataclass
class Source:
    """Where a checkpoint comes from: the command's arguments, and its environment by address."""

    url: str
    arguments: list[str]
    environ: Callable[[str], dict[str, str]]
    files: dict[str, bytes] = field(default_factory=dict)

    def fetch(self, at: Volume, url: str | None = None, to: bool = True) -> tuple[int, list[str]]:
        """Exit status and the lines that it said."""
        command = [sys.executable, "-m", "plimsoll_engine.download", *self.arguments]
        command += [f"--to={at.path}"] if to else []
        environ = {**os.environ, "NO_PROXY": "127.0.0.1", **self.environ(url or self.url)}
        done = subprocess.run(
            at.inside(*command), env=environ, capture_output=True, text=True, timeout=120
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()


@pytest.fixture(params=["s3", "hub"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "s3":
        bucket: Store = request.getfixturevalue("store")
        bucket.cutting = False
        return Source(
            bucket.url, [f"--s3=s3://{BUCKET}/models/tiny"], of_s3.environ, dict(of_s3.FILES)
        )
    url, _ = request.getfixturevalue("hub")
    return Source(
        url,
        ["--repository=org/tiny"],
        lambda at: of_hub.environment(at, tmp_path / "home"),
        dict(of_hub.FILES),
    )


def has(at: Volume, files: dict[str, bytes]) -> bool:
    return all((at.seen / name).read_bytes() == data for name, data in files.items())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def fill_in_the_middle(at: Volume, source: Source) -> tuple[int, list[str]]:
    """Room is promised and then taken: the check before the download finds more than is left."""
    with at.fill().open("ab") as ballast:
        ballast.truncate(max(0, ballast.tell() - LEFT))
    blind = "import shutil,sys,runpy; shutil.disk_usage=lambda _: type('U',(),{'free':1<<40})();"
    blind += "sys.argv=['download',*sys.argv[1:]];"
    blind += "runpy.run_module('plimsoll_engine.download',run_name='__main__')"
    command = [sys.executable, "-c", blind, *source.arguments, f"--to={at.path}"]
    environ = {**os.environ, "NO_PROXY": "127.0.0.1", **source.environ(source.url)}
    done = subprocess.run(
        at.inside(*command), env=environ, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_a_volume_that_fills_up_in_the_middle_is_named_and_gone_on_with(
    source: Source, model: Path
) -> None:
    with volume(model, 1 << 10) as at:
        status, said = fill_in_the_middle(at, source)
        assert status == 1
        assert f"cannot write to {model}: No space left on device" in said[-1]
        assert "free space on its volume" in said[-1]
        assert read_complete_version(at.seen) is None, "half a checkpoint is not served"
        (at.seen / "ballast").unlink()
        assert source.fetch(at)[0] == 0
        assert has(at, source.files)
        assert source.fetch(at, AWAY)[0] == 0, "a whole one is"


def test_a_whole_checkpoint_on_a_read_only_volume_is_used(source: Source, model: Path) -> None:
    with volume(model, 4 << 10) as at:
        assert source.fetch(at)[0] == 0
        at.mount("remount,ro")
        assert source.fetch(at)[0] == 0
        assert source.fetch(at, AWAY)[0] == 0


def test_a_read_only_volume_without_one_is_named(source: Source, model: Path) -> None:
    with volume(model) as at:
        at.mount("remount,ro")
        status, said = source.fetch(at)
    assert status == 1, said
    assert f"cannot write to {model}: Read-only file system" in said[-1]
    assert "mount its volume writable" in said[-1]


def test_half_of_a_newer_version_is_not_the_older_one(store: Store, model: Path) -> None:
    """The small files of the new version are there, its weights are not."""
    store.cutting = False
    source = Source(store.url, [f"--s3=s3://{BUCKET}/models/tiny"], of_s3.environ)
    with volume(model, 1 << 10) as at:
        assert source.fetch(at)[0] == 0
        store.objects["models/tiny/config.json"] = b'{"model_type": "new"}'
        store.objects["models/tiny/model.safetensors"] = os.urandom(len(of_s3.WEIGHTS))
        status, said = fill_in_the_middle(at, source)
        assert (status, len(said)) == (1, 1), said
        assert read_complete_version(at.seen) is None, "a mixture of two versions is not served"
        (at.seen / "ballast").unlink()
        assert source.fetch(at)[0] == 0
        assert has(at, {"config.json": b'{"model_type": "new"}'})


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_the_hubs_cache_that_takes_nothing_is_named_and_used_as_far_as_it_goes(
    hub: tuple[str, list[str]], tmp_path: Path, trouble: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    source = Source(hub[0], ["--repository=org/tiny"], lambda url: of_hub.environment(url, home))

    def hinder(at: Volume) -> None:
        if trouble == "full":
            at.fill()
        else:
            at.mount("remount,ro")

    with volume(home) as at:
        hinder(at)
        status, said = source.fetch(at, to=False)
        assert status == 1
        assert f"cannot write to {home}/hub" in said[-1]
        assert source.fetch(at, AWAY, to=False)[0] == 1, "half a checkpoint is not served"
    with volume(home, 4 << 10) as at:
        status, said = source.fetch(at, to=False)
        assert status == 0, said
        hinder(at)
        assert source.fetch(at, to=False) == (0, said), "it is all there"
