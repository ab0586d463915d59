"""What the frontend counts of its own work, to find out what a growth follows.

Tests ``frontend/observability/load.py``.
"""

from collections.abc import Iterator
from typing import Literal

from plimsoll_api.admin import Load
from plimsoll_engine.frontend.observability.load import (
    PROMPT_HASH_SLOTS,
    CacheUsage,
    EpochCounts,
    merge_load,
)
from plimsoll_engine.messages.worker_ipc import Media


def media(kind: Literal["image", "audio"], key: bytes) -> Media:
    return Media(kind=kind, key=key, start=0, length=1, tokens=1, shape=[1])


def test_prompts_count_once_and_media_by_kind() -> None:
    counts = EpochCounts()
    counts.count_admitted([1, 2, 3], [])
    counts.count_admitted([1, 2, 3], [])
    counts.count_admitted([1, 2, 3], [media("image", b"a"), media("image", b"b")])
    counts.count_admitted([1, 2, 3], [media("audio", b"c")])
    load = merge_load(Load(steps_total=7), counts, num_inflight=2, cache_usage=CacheUsage(kv=0.25))
    assert (load.requests_total, load.prompt_tokens_total) == (4, 12)
    assert (load.images_total, load.audios_total) == (2, 1)
    assert load.distinct_prompts_total == 3
    assert load.adapters_total is None, "this engine loads none: unknown, not zero"
    assert (load.steps_total, load.inflight) == (7, 2)


def test_choices_of_one_prompt_are_read_once_and_count_each() -> None:
    class Counted(list[int]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            self.reads += 1
            return super().__iter__()

    prompt, counts = Counted([1, 2, 3]), EpochCounts()
    counts.count_admitted(prompt, [media("image", b"a")], 128)
    assert prompt.reads <= 1
    found = (counts.requests, counts.prompt_tokens, counts.images, counts.distinct_prompts)
    assert found == (128, 384, 128, 1)


def test_many_prompts_need_no_more_memory() -> None:
    counts = EpochCounts()
    for number in range(3 * PROMPT_HASH_SLOTS):
        counts.count_admitted([number, number + 1], [])
    assert counts.distinct_prompts == 3 * PROMPT_HASH_SLOTS
    assert len(counts._prompts) == PROMPT_HASH_SLOTS
