"""Load figures of one epoch, from the frontend and the worker."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from plimsoll_api.admin import Load
from plimsoll_engine.messages.worker_ipc import Media, Report

KNOWN_PROMPTS = 4096
"""Slots of the prompt hash table, which is 32 KiB large."""


@dataclass(slots=True)
class EpochCounts:
    """The frontend's counts of one epoch.

    ``adapters`` is None if the engine takes no adapters. A carried request counts in the epoch that
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

    def count_admitted(
        self, prompt_ids: Sequence[int], media: Iterable[Media], choices: int = 1
    ) -> None:
        """Count ``choices`` requests that share this prompt. Hashes the prompt once.

        A prompt whose hash slot was overwritten counts as distinct again.
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
    """Shares of a worker's capacity, 0 to 1; None if it has none or has not reported."""

    kv: float | None = None
    kv_lost: float | None = None
    offload_lost: float | None = None
    encoder_lost: float | None = None

    @classmethod
    def from_report(cls, report: Report) -> Usage:
        """Return the shares in ``report``; None for pools without a size."""
        return cls(
            kv=_ratio(report.kv_blocks_used, report.kv_blocks_total),
            kv_lost=_ratio(report.kv_blocks_lost, report.kv_blocks_total),
            offload_lost=_ratio(report.host_blocks_lost, report.host_blocks_total),
            encoder_lost=_ratio(report.encoder_tokens_lost, report.encoder_tokens_total),
        )


def _ratio(part: int | None, whole: int | None) -> float | None:
    # Lost outputs can exceed the whole budget.
    return min(1.0, part / whole) if part is not None and whole else None


REPORT_FRESH_S = 5.0
"""Age of a report above which the worker may hang; it reports twice a second."""


def merge(
    reported: Load | None,
    counts: EpochCounts,
    inflight: int,
    usage: Usage,
    report_age_s: float | None = None,
) -> Load:
    """Return the engine's load.

    The worker's latest report provides what only it knows: running, waiting, steps and preemptions.
    These values stay frozen while it hangs. All others come from the frontend. ``compiling`` is
    unknown once the report is old, because it must not excuse a hang.
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
