"""Download the objects below a bucket's prefix to a directory, which several pods may share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from plimsoll_engine.download.bucket import (
    Bucket,
    BucketObject,
    ObjectChangedError,
    StoreUnreachableError,
)
from plimsoll_engine.download.target import (
    DownloadError,
    ProgressLogger,
    check_free_space,
    is_ignored,
    make_unwritable_error,
    mark_complete,
    mark_incomplete,
    read_complete_version,
    sum_file_bytes,
)

log = logging.getLogger("download")

# JSON object with the ETag of each complete file, by file name.
INDEX_FILE = ".plimsoll-objects.json"
LOCK_FILE = ".plimsoll-lock"
MAX_PARALLEL_DOWNLOADS = 4


def download(uri: str, target: Path) -> str:
    """Download the objects below ``uri`` to ``target``. Return a hash of the objects.

    Raises :class:`DownloadError`.
    """
    present = read_complete_version(target)
    # Do not retry the listing if the checkpoint is already here.
    bucket = Bucket(uri) if present is None else Bucket(uri, max_retries=0)
    try:
        listed = bucket.list_objects()
    except StoreUnreachableError as error:
        if present is None:
            raise DownloadError(
                f"cannot reach {error}; check the network and AWS_ENDPOINT_URL"
            ) from None
        log.warning("cannot reach %s; using the files in %s", error, target)
        return present
    wanted = _select_objects(listed)
    if not wanted:
        raise DownloadError(
            f"{uri} has no objects: set spec.model.uri to the prefix of a checkpoint"
        )
    listing = "".join(f"{n}\0{one.etag}\0{one.size}\n" for n, one in sorted(wanted.items()))
    version = hashlib.sha256(listing.encode()).hexdigest()[:16]
    if present == version:
        return version  # nothing to write: the volume may be read-only
    target.mkdir(parents=True, exist_ok=True)
    with _hold_lock(target):
        if read_complete_version(target) != version:
            _download_objects(Bucket(uri), wanted, target)
            mark_complete(target, version)
    return version


def _select_objects(objects: list[BucketObject]) -> dict[str, BucketObject]:
    paths = {PurePosixPath(obj.path): obj for obj in objects}
    folders = {parent for path in paths for parent in path.parents}
    found = {}
    for path, obj in paths.items():
        if (path in folders and not obj.size) or is_ignored(str(path)):
            continue  # an empty object marks a folder
        if ".." in path.parts or path.parts[0].startswith(".plimsoll"):
            raise DownloadError(
                f"the name of the object {obj.path!r} is not a valid file name: rename the object"
            )
        found[str(path)] = obj
    return found


@contextlib.contextmanager
def _hold_lock(target: Path) -> Iterator[None]:
    with (target / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another pod that downloads to %s", target)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download_objects(bucket: Bucket, objects: dict[str, BucketObject], target: Path) -> None:
    index = _read_index(target)
    missing = {name: one for name, one in objects.items() if index.get(name) != one.etag}
    size = sum(one.size for one in objects.values())
    check_free_space(target, size - sum_file_bytes(target))
    mark_incomplete(target)
    for name in index.keys() - objects.keys():
        (target / name).unlink(missing_ok=True)
    index = {name: etag for name, etag in index.items() if name in objects}
    guard = threading.Lock()

    def fetch(name: str, obj: BucketObject) -> None:
        _download_object(bucket, obj, target / name)
        with guard:
            index[name] = obj.etag
            _replace_file(target / INDEX_FILE, json.dumps(index, sort_keys=True))

    # Largest first, so that the end does not wait for a single large file.
    order = sorted(missing.items(), key=lambda one: -one[1].size)
    with ProgressLogger(target, size), ThreadPoolExecutor(MAX_PARALLEL_DOWNLOADS) as pool:
        tasks = [pool.submit(fetch, name, obj) for name, obj in order]
        try:
            for task in tasks:
                task.result()
        except StoreUnreachableError as error:
            raise DownloadError(f"the download failed: {error}; start again to resume") from error
        except OSError as error:
            raise make_unwritable_error(target, error) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _download_object(bucket: Bucket, bucket_object: BucketObject, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    etag = hashlib.sha256(bucket_object.etag.encode()).hexdigest()[:12]
    part = path.with_name(f"{path.name}.{etag}.part")
    for other in path.parent.glob(f"{path.name}.*.part"):
        if other != part:
            other.unlink()
    with part.open("ab") as file:
        offset = file.tell()
        if offset > bucket_object.size:
            file.truncate(offset := 0)  # appending continues at the new end
        if offset < bucket_object.size:
            try:
                for block in bucket.read_object(bucket_object, offset):
                    file.write(block)
            except ObjectChangedError:
                part.unlink()
                raise
        file.flush()
        os.fsync(file.fileno())
        received = os.fstat(file.fileno()).st_size
    if received != bucket_object.size:
        raise StoreUnreachableError(
            f"received only {received} of the {bucket_object.size} bytes of {bucket_object.path}"
        )
    part.replace(path)


def _read_index(target: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((target / INDEX_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def _replace_file(path: Path, text: str) -> None:
    whole = path.with_name(f"{path.name}.new")
    whole.write_text(text)
    whole.replace(path)
