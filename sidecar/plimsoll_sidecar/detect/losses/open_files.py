"""What an incident says of open files: at its limit, a process accepts no connection any more."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from plimsoll_api.assessment import Suspicion
from plimsoll_api.trace import OpenFiles

NEAR_RATIO = 0.8
"""From this share of the limit on it is evidence. The alert PlimsollEngineOpenFilesHigh begins
there, too."""


def with_open_files(suspicions: Iterable[Suspicion], files: OpenFiles | None) -> list[Suspicion]:
    """Return the suspicions, each with a sentence on the files if they are near the limit."""
    if files is None or files.ratio < NEAR_RATIO:
        return list(suspicions)
    sentence = f"{files.process} has {files.open:,} files open, and its limit is {files.limit:,}"
    return [msgspec.structs.replace(one, evidence=[*one.evidence, sentence]) for one in suspicions]
