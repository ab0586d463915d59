"""What only looks like a leak: the families of false positives, each split's by their names."""

from __future__ import annotations

import healthy_known
import unseen_memory
import unseen_silence
import unseen_work
from cases import Build, Split

FAMILIES: dict[Split, dict[str, Build]] = {
    Split.DEVELOPMENT: healthy_known.DEVELOPMENT,
    Split.SEEN: healthy_known.SEEN,
    Split.TEST: unseen_memory.FAMILIES | unseen_work.FAMILIES | unseen_silence.FAMILIES,
}
