"""What the frontend counts of its own work in one epoch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from plimsoll_api.admin import Load


@dataclass(slots=True)
class EpochCounts:
    """All zero when the epoch begins. A carried request counts in the epoch that admitted it."""

    requests: int = 0
    aborted: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


def merge(reported: Load | None, counts: EpochCounts, inflight: int) -> Load:
    """The engine's load: what only the worker knows (running, waiting, steps, preemptions) from its
    last report, frozen while it hangs; everything else from the frontend, which goes on counting.
    """
    return msgspec.structs.replace(
        reported or Load(),
        inflight=inflight,
        requests_total=counts.requests,
        aborted_total=counts.aborted,
        errors_total=counts.errors,
        prompt_tokens_total=counts.prompt_tokens,
        generation_tokens_total=counts.generation_tokens,
    )
