"""``python -m plimsoll_engine.download``: a checkpoint into a directory, before the engine starts.

What an earlier run left half done is gone on with; a directory that is complete is used as it is,
also while its source cannot be reached.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from plimsoll_engine.download.target import DownloadError

log = logging.getLogger("download")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the checkpoint is there, 1 with the reason where it cannot be."""
    parser = argparse.ArgumentParser(prog="plimsoll_engine.download", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--repository", metavar="ORGANISATION/NAME", help="of the hub")
    source.add_argument("--s3", metavar="s3://BUCKET/PREFIX", help="objects below a prefix")
    parser.add_argument("--revision", default="main", metavar="BRANCH|TAG|COMMIT")
    parser.add_argument("--to", required=True, type=Path, metavar="DIRECTORY")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        # Only what is needed: the hub's client alone takes a second to import.
        if given.s3:
            from plimsoll_engine.download import s3

            version = s3.download(given.s3, given.to, os.environ)
        else:
            from plimsoll_engine.download import hub

            version = hub.download(given.repository, given.revision, given.to)
    except DownloadError as error:
        log.error("%s", error)
        return 1
    log.info("%s@%s is in %s", given.s3 or given.repository, version, given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
