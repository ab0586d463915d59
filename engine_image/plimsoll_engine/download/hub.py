"""Download a repository of the Hugging Face Hub to a directory or to the hub's cache.

Several pods may share the directory, because the hub's client locks each file.
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
    IGNORED_PATTERNS,
    DownloadError,
    ProgressLogger,
    check_free_space,
    is_disk_error,
    is_ignored,
    make_unwritable_error,
    mark_complete,
    mark_incomplete,
    read_complete_version,
    sum_file_bytes,
)

log = logging.getLogger("download")


TOKEN_FIELD = "spec.model.tokenSecretRef (the variable HF_TOKEN)"
# Variables of hf-xet 1.8 for its buffer sizes, which are the total divided by these numbers.
XET_BUFFER_DIVISORS = {
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT": 1,
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE": 2,
    "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_PERFILE_SIZE": 8,
    "HF_XET_RECONSTRUCTION_MIN_PREFETCH_BUFFER": 8,
    "HF_XET_RECONSTRUCTION_MIN_RECONSTRUCTION_FETCH_SIZE": 8,
    "HF_XET_RECONSTRUCTION_MAX_RECONSTRUCTION_FETCH_SIZE": 4,
}
# hf-xet's former default, which suffices for any network.
MAX_BUFFERS_BYTES = 2_000_000_000


def limit_buffers(environ: MutableMapping[str, str], headroom_bytes: int | None) -> None:
    """Limit hf-xet's buffers to a quarter of ``headroom_bytes``, by variables in ``environ``.

    By default, hf-xet sizes its buffers by the machine's memory instead of the container's limit.
    None changes nothing, and variables that are already set are kept.
    """
    if headroom_bytes is None:
        return
    total = min(headroom_bytes // 4, MAX_BUFFERS_BYTES)
    for name, divisor in XET_BUFFER_DIVISORS.items():
        environ.setdefault(name, f"{total // divisor}")


class _HubUnreachableError(Exception):
    # The message is that of the hub's client library.
    pass


def _fetch_model_info(repository: str, revision: str) -> ModelInfo:
    # Raises DownloadError or _HubUnreachableError.
    try:
        return HfApi().model_info(repository, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise DownloadError(
            f"{repository} requires that you accept its terms: accept them on the hub, and set "
            f"a token in {TOKEN_FIELD}"
        ) from None
    except RevisionNotFoundError:
        raise DownloadError(
            f"{repository} has no revision {revision!r}: use a branch, tag or commit of it"
        ) from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"{repository} does not exist, or is private: correct the name, or set a token with "
            f"access in {TOKEN_FIELD}"
        ) from None
    except Exception as error:  # noqa: BLE001 - transport errors are the client's HTTP library's own
        raise _HubUnreachableError(str(error)) from None


def download_to_cache(repository: str, revision: str) -> Path:
    """Download a revision to the hub's cache, and return its folder. Raises DownloadError.

    If the hub cannot be reached, return the folder of an earlier download.
    """
    info: ModelInfo | None = None
    try:
        info = _fetch_model_info(repository, revision)
    except _HubUnreachableError as error:
        log.warning("cannot reach the hub: %s; using the files in %s", error, HF_HUB_CACHE)
    commit = (info.sha if info is not None else None) or revision
    try:
        if info is None:
            return _find_cached_folder(repository, commit)
        return Path(
            snapshot_download(repository, revision=commit, ignore_patterns=list(IGNORED_PATTERNS))
        )
    except LocalEntryNotFoundError:
        raise DownloadError(
            f"{repository}@{revision} is not in {HF_HUB_CACHE}, and the hub cannot be reached: "
            "set HF_HOME to a cache that has it, set HF_ENDPOINT to a mirror, unset "
            "HF_HUB_OFFLINE, or use a checkpoint directory as --model"
        ) from None
    except Exception as error:
        if (
            info is not None
            and is_disk_error(error)
            and (found := _find_complete_cached_folder(repository, commit, info))
        ):
            return found
        if is_disk_error(error):
            raise make_unwritable_error(HF_HUB_CACHE, error) from error
        raise DownloadError(
            f"cannot download {repository}@{revision}: {error}; start again to resume"
        ) from error


def _find_cached_folder(repository: str, revision: str) -> Path:
    # Raises LocalEntryNotFoundError also for a folder that may be incomplete.
    found = Path(
        snapshot_download(
            repository,
            revision=revision,
            local_files_only=True,
            ignore_patterns=list(IGNORED_PATTERNS),
        )
    )
    # The client compares with its stored list of files, which a full disk may lack.
    if not list(found.parents[1].glob("trees/*.json")) and list(
        found.parents[1].glob("blobs/*.incomplete")
    ):
        raise LocalEntryNotFoundError(f"{found} may be incomplete")
    return found


def _find_complete_cached_folder(repository: str, commit: str, info: ModelInfo) -> Path | None:
    try:
        found = _find_cached_folder(repository, commit)
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
    """Download a revision to ``target`` and return its commit. Raises DownloadError."""
    present = read_complete_version(target)
    try:
        info = _fetch_model_info(repository, revision)
    except _HubUnreachableError as error:
        if present is not None:
            log.warning("cannot reach the hub: %s; using the files in %s", error, target)
            return present
        raise DownloadError(
            f"cannot reach the hub to download {repository}: {error}; check the network and "
            "HF_ENDPOINT"
        ) from None
    commit = info.sha or revision
    if present == commit:
        return commit
    wanted = sum(one.size or 0 for one in info.siblings or ())
    target.mkdir(parents=True, exist_ok=True)
    check_free_space(target, wanted - sum_file_bytes(target))
    mark_incomplete(target)
    with ProgressLogger(target, wanted):
        try:
            snapshot_download(
                repository,
                revision=commit,
                local_dir=target,
                ignore_patterns=list(IGNORED_PATTERNS),
            )
        except Exception as error:
            if is_disk_error(error):
                raise make_unwritable_error(target, error) from error
            raise DownloadError(
                f"cannot download {repository}@{commit}: {error}; start again to resume"
            ) from error
    mark_complete(target, commit)
    return commit
