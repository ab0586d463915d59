"""Download of the objects below a prefix of a bucket to a directory.

An interrupted file continues, a complete one is not fetched again, and one that the bucket no
longer has is removed. Pods that share the directory take turns with a lock.
"""

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

from plimsoll_engine.download.bucket import Bucket, Changed, Item, Unreachable
from plimsoll_engine.download.target import (
    DownloadError,
    Progress,
    begin,
    complete,
    finish,
    is_ignored,
    require_space,
    total_bytes,
    unwritable_error,
)

log = logging.getLogger("download")

INDEX = ".plimsoll-objects.json"
"""Index of complete files: etag by name."""
LOCK = ".plimsoll-lock"
AT_ONCE = 4


def download(uri: str, target: Path) -> str:
    """Download ``uri`` to ``target`` and return its version, a hash of the bucket's contents.

    Raises :class:`DownloadError`.
    """
    there = complete(target)
    # Do not retry the listing if the checkpoint is already here.
    bucket = Bucket(uri) if there is None else Bucket(uri, retries=0)
    try:
        listed = bucket.list()
    except Unreachable as error:
        if there is None:
            raise DownloadError(f"cannot be reached: {error}") from None
        log.warning("cannot reach %s: using the cached files", error)
        return there
    wanted = _select(listed)
    if not wanted:
        raise DownloadError(f"{uri} has no objects")
    listing = "".join(f"{n}\0{one.etag}\0{one.size}\n" for n, one in sorted(wanted.items()))
    version = hashlib.sha256(listing.encode()).hexdigest()[:16]
    if there == version:
        return version  # nothing to write: the volume may be read-only
    target.mkdir(parents=True, exist_ok=True)
    with _exclusive(target):
        if complete(target) != version:
            _fetch_all(Bucket(uri), wanted, target)
            finish(target, version)
    return version


def _select(items: list[Item]) -> dict[str, Item]:
    """Return the objects to download by their paths relative to the target."""
    paths = {PurePosixPath(item.path): item for item in items}
    folders = {parent for path in paths for parent in path.parents}
    found = {}
    for path, item in paths.items():
        if (path in folders and not item.size) or is_ignored(str(path)):
            continue  # an empty object marks a folder
        if ".." in path.parts or path.parts[0].startswith(".plimsoll"):
            raise DownloadError(
                f"the object {item.path!r} has a name that is not a valid file name"
            )
        found[str(path)] = item
    return found


@contextlib.contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    with (target / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another pod is filling %s: waiting for it", target)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_all(bucket: Bucket, wanted: dict[str, Item], target: Path) -> None:
    index = _index(target)
    missing = {name: one for name, one in wanted.items() if index.get(name) != one.etag}
    size = sum(one.size for one in wanted.values())
    require_space(target, size - total_bytes(target))
    begin(target)
    for name in index.keys() - wanted.keys():
        (target / name).unlink(missing_ok=True)
    index = {name: etag for name, etag in index.items() if name in wanted}
    guard = threading.Lock()

    def fetch(name: str, item: Item) -> None:
        _fetch(bucket, item, target / name)
        with guard:
            index[name] = item.etag
            _write(target / INDEX, json.dumps(index, sort_keys=True))

    # Largest first, so that the end does not wait for a single large file.
    order = sorted(missing.items(), key=lambda one: -one[1].size)
    with Progress(target, size), ThreadPoolExecutor(AT_ONCE) as pool:
        tasks = [pool.submit(fetch, name, item) for name, item in order]
        try:
            for task in tasks:
                task.result()
        except Unreachable as error:
            raise DownloadError(f"{error}; the files downloaded so far are kept") from error
        except OSError as error:
            raise unwritable_error(target, error) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _fetch(bucket: Bucket, item: Item, path: Path) -> None:
    """Download one file, continuing a partial file of the same etag."""
    path.parent.mkdir(parents=True, exist_ok=True)
    etag = hashlib.sha256(item.etag.encode()).hexdigest()[:12]
    part = path.with_name(f"{path.name}.{etag}.part")
    for other in path.parent.glob(f"{path.name}.*.part"):
        if other != part:
            other.unlink()
    with part.open("ab") as file:
        offset = file.tell()
        if offset > item.size:
            file.truncate(offset := 0)  # appending continues at the new end
        if offset < item.size:
            try:
                for block in bucket.read(item, offset):
                    file.write(block)
            except Changed:
                part.unlink()
                raise
        file.flush()
        os.fsync(file.fileno())
        came = os.fstat(file.fileno()).st_size
    if came != item.size:
        raise Unreachable(f"{item.path}: received {came} of {item.size} bytes")
    part.replace(path)


def _index(target: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((target / INDEX).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def _write(path: Path, text: str) -> None:
    whole = path.with_name(f"{path.name}.new")
    whole.write_text(text)
    whole.replace(path)
