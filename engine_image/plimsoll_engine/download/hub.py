"""A repository of the Hugging Face Hub into a directory, or into the hub's own cache.

What an earlier run left half done is gone on with. Several pods may share the directory: the hub's
client takes a lock for each file.
"""

from __future__ import annotations

import logging
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
    complete,
    finish,
    require_space,
    size_of,
)

log = logging.getLogger("download")


TOKEN = "spec.model.tokenSecretRef (the variable HF_TOKEN)"


class _AwayError(Exception):
    """The hub cannot be reached; the message says why."""


def _info(repository: str, revision: str) -> ModelInfo:
    """What the hub knows of a revision. Raises :class:`DownloadError`, :class:`_AwayError`."""
    try:
        return HfApi().model_info(repository, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise DownloadError(
            f"{repository} asks for its terms to be accepted: accept them on the hub and name a "
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
    """The folder of the revision in the hub's cache; :class:`DownloadError` where there is none.

    While the hub cannot be reached, what the cache has is used.
    """
    known: str | None = None
    try:
        known = _info(repository, revision).sha
    except _AwayError as error:
        log.warning("the hub cannot be reached (%s): looking into %s", error, HF_HUB_CACHE)
    try:
        return Path(
            snapshot_download(
                repository,
                revision=known or revision,
                local_files_only=known is None,
                ignore_patterns=list(IGNORED),
            )
        )
    except LocalEntryNotFoundError:
        raise DownloadError(
            f"{repository}@{revision} is not in {HF_HUB_CACHE}, and the hub cannot be reached: "
            "name a cache that has it in HF_HOME, a mirror in HF_ENDPOINT, unset HF_HUB_OFFLINE, "
            "or give a checkpoint directory as --model"
        ) from None
    except Exception as error:
        raise DownloadError(f"{repository}@{revision}: {error}; what came is kept") from error


def download(repository: str, revision: str, target: Path) -> str:
    """The commit in ``target``; :class:`DownloadError` where it cannot be had."""
    there = complete(target)
    try:
        info = _info(repository, revision)
    except _AwayError as error:
        if there is not None:
            log.warning("the hub cannot be reached (%s): using what is here", error)
            return there
        raise DownloadError(f"the hub cannot be reached: {error}") from None
    commit = info.sha or revision
    if there == commit:
        return commit
    wanted = sum(one.size or 0 for one in info.siblings or ())
    target.mkdir(parents=True, exist_ok=True)
    require_space(target, wanted - size_of(target))
    with Progress(target, wanted):
        try:
            snapshot_download(
                repository,
                revision=commit,
                local_dir=target,
                ignore_patterns=list(IGNORED),
            )
        except Exception as error:
            raise DownloadError(f"{repository}@{commit}: {error}; what came is kept") from error
    finish(target, commit)
    return commit
