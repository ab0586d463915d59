"""Load of the engine in one epoch, from the frontend's counts and the worker's report."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from plimsoll_api.admin import Load
from plimsoll_engine.messages.worker_ipc import Media, Report

# The hash table takes 32 KiB.
PROMPT_HASH_SLOTS = 4096


@dataclass(slots=True)
class EpochCounts:
    """Counts of the requests that were admitted in one epoch.

    ``adapters`` is the number of adapter loads; None if the engine does not serve adapters.
    """

    requests: int = 0
    aborted: int = 0
    errors: int = 0
    images: int = 0
    audios: int = 0
    distinct_prompts: int = 0
    adapters: int | None = None
    prompt_tokens: int = 0
    generation_tokens: int = 0
    _prompts: array[int] = field(default_factory=lambda: array("q", bytes(8 * PROMPT_HASH_SLOTS)))

    def count_admitted(
        self, prompt_ids: Sequence[int], media: Iterable[Media], num_choices: int = 1
    ) -> None:
        """Count ``num_choices`` requests that share one prompt, and the prompt if it is new."""
        self.requests += num_choices
        self.prompt_tokens += num_choices * len(prompt_ids)
        keys = []
        for item in media:
            self.images += num_choices * (item.kind == "image")
            self.audios += num_choices * (item.kind == "audio")
            keys.append(item.key)
        prompt = hash((*prompt_ids, *keys))
        place = prompt % PROMPT_HASH_SLOTS
        if self._prompts[place] != prompt:
            self._prompts[place] = prompt
            self.distinct_prompts += 1


class CacheUsage(NamedTuple):
    """Used and lost shares of a worker's caches, 0 to 1; None if unknown."""

    kv: float | None = None
    kv_lost: float | None = None
    offload_lost: float | None = None
    encoder_lost: float | None = None

    @classmethod
    def from_report(cls, report: Report) -> CacheUsage:
        """Return the used and lost shares of the caches in ``report``."""
        return cls(
            kv=_compute_share(report.kv_blocks_used, report.kv_blocks_total),
            kv_lost=_compute_share(report.kv_blocks_lost, report.kv_blocks_total),
            offload_lost=_compute_share(report.host_blocks_lost, report.host_blocks_total),
            encoder_lost=_compute_share(report.encoder_tokens_lost, report.encoder_tokens_total),
        )


def _compute_share(part: int | None, total: int | None) -> float | None:
    # Lost encoder outputs may exceed the whole budget.
    return min(1.0, part / total) if part is not None and total else None


# The worker may hang if its report is older. It reports twice a second.
MAX_REPORT_AGE_S = 5.0


def merge_load(
    worker_load: Load | None,
    counts: EpochCounts,
    num_inflight: int,
    cache_usage: CacheUsage,
    report_age_s: float | None = None,
) -> Load:
    """Return the engine's load, from the frontend's counts and the worker's latest report.

    ``compiling`` is None if the report is older than :data:`MAX_REPORT_AGE_S`, because an outdated
    value would hide a hang.
    """
    fresh = (
        worker_load is not None and report_age_s is not None and report_age_s <= MAX_REPORT_AGE_S
    )
    return msgspec.structs.replace(
        worker_load or Load(),
        compiling=worker_load.compiling if worker_load is not None and fresh else None,
        inflight=num_inflight,
        kv_usage_ratio=cache_usage.kv,
        kv_lost_ratio=cache_usage.kv_lost,
        offload_lost_ratio=cache_usage.offload_lost,
        encoder_lost_ratio=cache_usage.encoder_lost,
        requests_total=counts.requests,
        aborted_total=counts.aborted,
        errors_total=counts.errors,
        images_total=counts.images,
        audios_total=counts.audios,
        distinct_prompts_total=counts.distinct_prompts,
        adapters_total=counts.adapters,
        prompt_tokens_total=counts.prompt_tokens,
        generation_tokens_total=counts.generation_tokens,
    )
