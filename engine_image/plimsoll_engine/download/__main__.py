"""Download a checkpoint to a directory, or to the hub's cache (HF_HOME) without ``--to``.

The last line of output is then the path of the checkpoint's folder.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from plimsoll_engine.download.target import DownloadError, make_unwritable_error
from plimsoll_engine.process.headroom import measure_host_headroom
from plimsoll_engine.process.parent_death import die_with_parent

log = logging.getLogger("download")
# Variables in which other HTTP clients expect the path of a CA bundle.
CA_BUNDLE_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Download a checkpoint. Return the exit status: 0, or 1 if the download failed."""
    parser = argparse.ArgumentParser(prog="plimsoll_engine.download", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--repository",
        metavar="ORGANISATION/NAME",
        help="repository of the Hugging Face Hub to download",
    )
    source.add_argument(
        "--s3", metavar="s3://BUCKET/PREFIX", help="URI of the prefix whose objects are downloaded"
    )
    parser.add_argument(
        "--revision",
        default="main",
        metavar="BRANCH|TAG|COMMIT",
        help="revision of the repository; default: main",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIRECTORY",
        help="directory to download to; default for a repository: the hub's cache",
    )
    parser.add_argument(
        "--parent",
        type=int,
        metavar="PID",
        help="PID of a process; the download exits when the process exits",
    )
    flags = parser.parse_args(arguments)
    if flags.s3 and flags.to is None:
        parser.error("--s3 requires --to: add a directory to download to")
    if flags.parent is not None:
        die_with_parent(flags.parent)
    # Loggers of libraries log each HTTP request.
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in CA_BUNDLE_VARIABLES:  # the clients used here read SSL_CERT_FILE
        if file := os.environ.get(name):
            os.environ.setdefault("SSL_CERT_FILE", file)
    try:
        # Import only what is needed: the hub's client takes a second.
        if flags.s3:
            from plimsoll_engine.download import s3

            version = s3.download(flags.s3, flags.to)
        else:
            from plimsoll_engine.download import hub

            hub.limit_buffers(os.environ, measure_host_headroom())
            if flags.to is None:
                log.info("%s", hub.download_to_cache(flags.repository, flags.revision))
                return 0
            version = hub.download(flags.repository, flags.revision, flags.to)
    except DownloadError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("%s", make_unwritable_error(flags.to or "the hub's cache (HF_HOME)", error))
        return 1
    log.info("the checkpoint %s@%s is in %s", flags.s3 or flags.repository, version, flags.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
