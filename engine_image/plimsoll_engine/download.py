"""``python -m plimsoll_engine.download``: a checkpoint of the Hugging Face Hub into a directory.

Runs in an init container before the engine. What an earlier run left half done is gone on with; a
directory that is complete is used as it is, also while the hub cannot be reached. Several pods may
share the directory: the hub's client takes a lock for each file.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

log = logging.getLogger("download")

COMPLETE = ".plimsoll-complete"
"""Written last: names the commit that the directory holds."""
PROGRESS_S = 10.0
IGNORED = ("*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "original/*")
"""The same weights in other formats."""


class DownloadError(Exception):
    """Why there is no checkpoint, and what to do about it."""


def download(repository: str, revision: str, target: Path) -> str:
    """The commit in ``target``; :class:`DownloadError` where it cannot be had."""
    done = target / COMPLETE
    api = HfApi()
    try:
        info = api.model_info(repository, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise DownloadError(
            f"{repository} asks for its terms to be accepted: accept them on the hub and name a "
            "token in spec.model.tokenSecretRef"
        ) from None
    except RevisionNotFoundError:
        raise DownloadError(f"{repository} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"{repository} does not exist, or is private: then spec.model.tokenSecretRef must "
            "name a token that may read it"
        ) from None
    except Exception as error:  # noqa: BLE001 - transport errors are the client's HTTP library's own
        if done.exists():
            log.warning("the hub cannot be reached (%s): using what is here", error)
            return done.read_text().strip()
        raise DownloadError(f"the hub cannot be reached: {error}") from None
    commit = info.sha or revision
    if done.exists() and done.read_text().strip() == commit:
        return commit
    wanted = sum(one.size or 0 for one in info.siblings or ())
    target.mkdir(parents=True, exist_ok=True)
    _require_space(target, wanted - size_of(target))
    with _Progress(target, wanted):
        try:
            snapshot_download(
                repository,
                revision=commit,
                local_dir=target,
                ignore_patterns=list(IGNORED),
            )
        except Exception as error:
            raise DownloadError(f"{repository}@{commit}: {error}; what came is kept") from error
    done.write_text(f"{commit}\n")
    return commit


def _require_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DownloadError(
            f"{target} has {free >> 20} MiB left and up to {needed >> 20} MiB are needed: name a "
            "larger claim in spec.model.cache"
        )


def size_of(folder: Path) -> int:
    """Bytes of all files below ``folder``; files that vanish meanwhile count as none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


class _Progress:
    """Says how far it is, every :data:`PROGRESS_S`."""

    def __init__(self, target: Path, wanted: int) -> None:
        self._target, self._wanted = target, wanted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PROGRESS_S):
            here = size_of(self._target)
            log.info("%d of %d MiB", here >> 20, self._wanted >> 20)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the checkpoint is there, 1 with the reason where it cannot be."""
    parser = argparse.ArgumentParser(prog="plimsoll_engine.download", description=__doc__)
    parser.add_argument("--repository", required=True, metavar="ORGANISATION/NAME")
    parser.add_argument("--revision", default="main", metavar="BRANCH|TAG|COMMIT")
    parser.add_argument("--to", required=True, type=Path, metavar="DIRECTORY")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        commit = download(given.repository, given.revision, given.to)
    except DownloadError as error:
        log.error("%s", error)
        return 1
    log.info("%s@%s is in %s", given.repository, commit, given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
