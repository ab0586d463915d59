"""Download of a Hugging Face Hub repository to a directory or to the hub's cache.

An interrupted download continues. Several pods may share the directory: the hub's client locks each
file.
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
    is_disk_error,
    is_ignored,
    require_space,
    total_bytes,
    unwritable_error,
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
"""Variables for hf-xet's buffers, each with its divisor of the total (hf-xet 1.8)."""
MAX_BUFFERS = 2_000_000_000
"""Maximum total in bytes, which suffices for any network: hf-xet's former default."""


def bound_buffers(environ: MutableMapping[str, str], headroom: int | None) -> None:
    """Limit hf-xet's buffers to a quarter of ``headroom``, the free bytes.

    hf-xet sizes its buffers by the machine's memory, which may be a hundred times a container's
    limit. It reads these variables of ``environ`` at its first download. Variables that are set
    stay.
    """
    if headroom is None:
        return
    whole = min(headroom // 4, MAX_BUFFERS)
    for name, part in BUFFERS.items():
        environ.setdefault(name, f"{whole // part}")


class _AwayError(Exception):
    """The hub cannot be reached. The message says why."""


def _info(repository: str, revision: str) -> ModelInfo:
    """Return the hub's information about a revision.

    Raises :class:`DownloadError` or :class:`_AwayError`.
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
            f"{repository} does not exist, or is private: set a token in {TOKEN} that may read it"
        ) from None
    except Exception as error:  # noqa: BLE001 - transport errors are the client's HTTP library's own
        raise _AwayError(str(error)) from None


def download_to_cache(repository: str, revision: str) -> Path:
    """Return the folder of the revision in the hub's cache, after downloading it.

    If the hub cannot be reached, the cached files are used. Raises :class:`DownloadError`.
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
            "set HF_HOME to a cache that has it or HF_ENDPOINT to a mirror, unset HF_HUB_OFFLINE, "
            "or give a checkpoint directory as --model"
        ) from None
    except Exception as error:
        if (
            info is not None
            and is_disk_error(error)
            and (found := _complete_snapshot(repository, commit, info))
        ):
            return found
        if is_disk_error(error):
            raise unwritable_error(HF_HUB_CACHE, error) from error
        raise DownloadError(
            f"{repository}@{revision}: {error}; the files downloaded so far are kept"
        ) from error


def _cached(repository: str, revision: str) -> Path:
    """Return the revision's folder in the cache.

    Raises LocalEntryNotFoundError if it is absent or may be incomplete.
    """
    found = Path(
        snapshot_download(
            repository, revision=revision, local_files_only=True, ignore_patterns=list(IGNORED)
        )
    )
    # The client compares with its stored list of files, which a full disk may lack.
    if not list(found.parents[1].glob("trees/*.json")) and list(
        found.parents[1].glob("blobs/*.incomplete")
    ):
        raise LocalEntryNotFoundError(f"{found} may lack files")
    return found


def _complete_snapshot(repository: str, commit: str, info: ModelInfo) -> Path | None:
    """Return the revision's folder in a read-only cache; None if a file of ``info`` is missing."""
    try:
        found = _cached(repository, commit)
    except (LocalEntryNotFoundError, OSError):
        return None
    for one in info.siblings or ():
        path = found / one.rfilename
        if not is_ignored(one.rfilename) and not (
            path.is_file() and path.stat().st_size == (one.size or path.stat().st_size)
        ):
            return None
    return found


def download(repository: str, revision: str, target: Path) -> str:
    """Download a revision to ``target`` and return its commit. Raises :class:`DownloadError`."""
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
    require_space(target, wanted - total_bytes(target))
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
            if is_disk_error(error):
                raise unwritable_error(target, error) from error
            raise DownloadError(
                f"{repository}@{commit}: {error}; the files downloaded so far are kept"
            ) from error
    finish(target, commit)
    return commit
