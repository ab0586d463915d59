"""A repository of the Hugging Face Hub into a directory, or into the hub's own cache.

What an earlier run left half done is gone on with. Several pods may share the directory: the hub's
client takes a lock for each file.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from plimsoll_engine.download.target import (
    IGNORED,
    DownloadError,
    Progress,
    begin,
    complete,
    finish,
    ignored,
    is_of_disk,
    require_space,
    size_of,
    unwritable,
)

log = logging.getLogger("download")


TOKEN = "spec.model.tokenSecretRef (the variable HF_TOKEN)"
BUFFERS = {
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT": 1,
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE": 2,
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_PERFILE_SIZE": 8,
    "HF_XET_RECONSTRUCTION_MIN_PREFETCH_BUFFER": 8,
    "HF_XET_RECONSTRUCTION_MIN_RECONSTRUCTION_FETCH_SIZE": 8,
    "HF_XET_RECONSTRUCTION_MAX_RECONSTRUCTION_FETCH_SIZE": 4,
}
"""hf-xet's settings of what it holds in memory, each with its part of the whole: hf-xet 1.8."""
MAX_BUFFERS = 2_000_000_000
"""Bytes that are enough for any network: hf-xet's own default before it looked at the machine."""


def bound_buffers(environ: MutableMapping[str, str], headroom: int | None) -> None:
    """Have hf-xet hold at most a quarter of ``headroom``, the bytes that are free.

    It sizes its buffers by the memory of the machine, which may be a hundred times the limit of a
    container. What ``environ`` sets already stays. It reads these variables at its first download.
    """
    if headroom is None:
        return
    whole = min(headroom // 4, MAX_BUFFERS)
    for name, part in BUFFERS.items():
        environ.setdefault(name, f"{whole // part}")


class _AwayError(Exception):
    """The hub cannot be reached; the message says why."""


def _info(repository: str, revision: str) -> ModelInfo:
    """Return what the hub knows of a revision.

    Raises :class:`DownloadError`, :class:`_AwayError`.
    """
    try:
        return HfApi().model_info(repository, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise DownloadError(
            f"{repository} requires that you accept its terms: accept them on the hub and set a "
            f"token in {TOKEN}"
        ) from None
    except RevisionNotFoundError:
        raise DownloadError(f"{repository} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"{repository} does not exist, or is private: then {TOKEN} must name a token that may "
            "read it"
        ) from None
    except Exception as error:  # noqa: BLE001 - transport errors are the client's HTTP library's own
        raise _AwayError(str(error)) from None


def into_cache(repository: str, revision: str) -> Path:
    """Return the folder of the revision in the hub's cache.

    :class:`DownloadError` where there is none.

    While the hub cannot be reached, what the cache has is used.
    """
    info: ModelInfo | None = None
    try:
        info = _info(repository, revision)
    except _AwayError as error:
        log.warning("cannot reach the hub (%s): looking in %s", error, HF_HUB_CACHE)
    commit = (info.sha if info is not None else None) or revision
    try:
        if info is None:
            return _cached(repository, commit)
        return Path(snapshot_download(repository, revision=commit, ignore_patterns=list(IGNORED)))
    except LocalEntryNotFoundError:
        raise DownloadError(
            f"{repository}@{revision} is not in {HF_HUB_CACHE}, and the hub cannot be reached: "
            "name a cache that has it in HF_HOME, a mirror in HF_ENDPOINT, unset HF_HUB_OFFLINE, "
            "or give a checkpoint directory as --model"
        ) from None
    except Exception as error:
        if info is not None and is_of_disk(error) and (found := _whole(repository, commit, info)):
            return found
        if is_of_disk(error):
            raise unwritable(HF_HUB_CACHE, error) from error
        raise DownloadError(
            f"{repository}@{revision}: {error}; the files downloaded so far are kept"
        ) from error


def _cached(repository: str, revision: str) -> Path:
    """Return the revision's folder in the cache.

    Raises LocalEntryNotFoundError, also where only a part of the files may be there.
    """
    found = Path(
        snapshot_download(
            repository, revision=revision, local_files_only=True, ignore_patterns=list(IGNORED)
        )
    )
    # The client compares with the list of files that it keeps. A full disk keeps neither.
    if not list(found.parents[1].glob("trees/*.json")) and list(
        found.parents[1].glob("blobs/*.incomplete")
    ):
        raise LocalEntryNotFoundError(f"{found} may lack files")
    return found


def _whole(repository: str, commit: str, info: ModelInfo) -> Path | None:
    """Return the folder in a read-only cache, None where it lacks a file of ``info``'s."""
    try:
        found = _cached(repository, commit)
    except (LocalEntryNotFoundError, OSError):
        return None
    for one in info.siblings or ():
        path = found / one.rfilename
        if not ignored(one.rfilename) and not (
            path.is_file() and path.stat().st_size == (one.size or path.stat().st_size)
        ):
            return None
    return found


def download(repository: str, revision: str, target: Path) -> str:
    """Return the commit in ``target``; :class:`DownloadError` where it cannot be had."""
    there = complete(target)
    try:
        info = _info(repository, revision)
    except _AwayError as error:
        if there is not None:
            log.warning("cannot reach the hub (%s): using the cached files", error)
            return there
        raise DownloadError(f"the hub cannot be reached: {error}") from None
    commit = info.sha or revision
    if there == commit:
        return commit
    wanted = sum(one.size or 0 for one in info.siblings or ())
    target.mkdir(parents=True, exist_ok=True)
    require_space(target, wanted - size_of(target))
    begin(target)
    with Progress(target, wanted):
        try:
            snapshot_download(
                repository,
                revision=commit,
                local_dir=target,
                ignore_patterns=list(IGNORED),
            )
        except Exception as error:
            if is_of_disk(error):
                raise unwritable(target, error) from error
            raise DownloadError(
                f"{repository}@{commit}: {error}; the files downloaded so far are kept"
            ) from error
    finish(target, commit)
    return commit
