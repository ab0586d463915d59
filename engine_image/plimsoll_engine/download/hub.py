"""A repository of the Hugging Face Hub into a directory.

What an earlier run left half done is gone on with. Several pods may share the directory: the hub's
client takes a lock for each file.
"""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
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


def download(repository: str, revision: str, target: Path) -> str:
    """The commit in ``target``; :class:`DownloadError` where it cannot be had."""
    there = complete(target)
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
