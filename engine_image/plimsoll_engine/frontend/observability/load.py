"""What the frontend counts of its own work in one epoch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from plimsoll_api.admin import Load
from plimsoll_engine.messages.worker_ipc import Media, Report

KNOWN_PROMPTS = 4096
"""Prompts that are remembered, each by its hash in the place that the hash names: 32 KiB."""


@dataclass(slots=True)
class EpochCounts:
    """The counts of one epoch, all zero when it begins.

    ``adapters`` is unknown where the engine takes none. A carried request counts in the epoch that
    admitted it.
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
    _prompts: array[int] = field(default_factory=lambda: array("q", bytes(8 * KNOWN_PROMPTS)))

    def admitted(self, prompt_ids: Sequence[int], media: Iterable[Media], choices: int = 1) -> None:
        """Count ``choices`` requests with these tokens, which are looked at once.

        A prompt that was pushed out of its place counts again.
        """
        self.requests += choices
        self.prompt_tokens += choices * len(prompt_ids)
        keys = []
        for one in media:
            self.images += choices * (one.kind == "image")
            self.audios += choices * (one.kind == "audio")
            keys.append(one.key)
        prompt = hash((*prompt_ids, *keys))
        place = prompt % KNOWN_PROMPTS
        if self._prompts[place] != prompt:
            self._prompts[place] = prompt
            self.distinct_prompts += 1


class Usage(NamedTuple):
    """Shares of a worker's capacity, from 0 to 1; None where it has none or has not reported."""

    kv: float | None = None
    kv_lost: float | None = None
    offload_lost: float | None = None
    encoder_lost: float | None = None

    @classmethod
    def of(cls, report: Report) -> Usage:
        """Return the shares that the worker reports; None where a pool has no size."""
        return cls(
            kv=_share(report.kv_blocks_used, report.kv_blocks_total),
            kv_lost=_share(report.kv_blocks_lost, report.kv_blocks_total),
            offload_lost=_share(report.host_blocks_lost, report.host_blocks_total),
            encoder_lost=_share(report.encoder_tokens_lost, report.encoder_tokens_total),
        )


def _share(part: int | None, whole: int | None) -> float | None:
    # Outputs that no ledger knows can be more than the whole budget.
    return min(1.0, part / whole) if part is not None and whole else None


REPORT_FRESH_S = 5.0
"""A worker reports twice a second; one that has not for so long may hang."""


def merge(
    reported: Load | None,
    counts: EpochCounts,
    inflight: int,
    usage: Usage,
    report_age_s: float | None = None,
) -> Load:
    """Return the engine's load.

    What only the worker knows (running, waiting, steps, preemptions) is from its last report,
    frozen while it hangs; everything else from the frontend, which goes on counting. What a worker
    that may hang said of its compilations is unknown: they are no excuse for it.
    """
    fresh = reported is not None and report_age_s is not None and report_age_s <= REPORT_FRESH_S
    return msgspec.structs.replace(
        reported or Load(),
        compiling=reported.compiling if reported is not None and fresh else None,
        inflight=inflight,
        kv_usage_ratio=usage.kv,
        kv_lost_ratio=usage.kv_lost,
        offload_lost_ratio=usage.offload_lost,
        encoder_lost_ratio=usage.encoder_lost,
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
