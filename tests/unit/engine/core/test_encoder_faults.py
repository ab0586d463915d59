"""The faults of images and sounds do what they say to a real engine, and the audit finds each.

Tests ``core/schedule/encoder_cache.py``.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from plimsoll_engine.caches.sender import MediaCacheSender
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.frontend.admin.engine_audit import RECEIVER_CACHE_RULE, compare_receiver_cache
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.memory.lost import count_lost_encoder_tokens
from plimsoll_engine.messages.worker_ipc import Media, Sampling, Submit
from plimsoll_engine.models import loader
from plimsoll_faults.defects import WorkerFaults
from plimsoll_faults.models.tiny_media import IMAGE_SIZE, NUM_IMAGE_TOKENS, write_llava

CAPACITY = 100_000
"""Bytes of the receiver cache: two images."""
Make = Callable[[str], EngineCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("llava")
    write_llava(folder)
    torch.set_num_threads(1)
    found = loader.load_model(
        folder, loader.load_config(folder), torch.float32, torch.device("cpu")
    )
    yield found
    found.close()


@pytest.fixture
def make(model: Any) -> Iterator[Make]:
    """An engine with the fault of that text; its encoder cache has room for two images."""
    engines: list[EngineCore] = []

    def make_one(text: str) -> EngineCore:
        cache = EncoderCache(2 * NUM_IMAGE_TOKENS)
        scheduler = Scheduler(BlockPool(200, 4), 8, 24, 256, cache)
        engine = EngineCore(Runner(model, 200, 4), scheduler, None, CAPACITY)
        WorkerFaults(text, 1, engine)
        engines.append(engine)
        return engine

    yield make_one
    for engine in engines:
        engine.runner.model = None  # it is shared: close() would take its tensors
        engine.close()


def image(seed: int, start: int) -> Media:
    pixels = [random.Random(seed).uniform(-1, 1) for _ in range(3)]
    data = torch.tensor(pixels).view(3, 1, 1).expand(3, IMAGE_SIZE, IMAGE_SIZE).contiguous()
    shape = list(data.shape)
    return Media(
        "image", b"image %d" % seed, start, NUM_IMAGE_TOKENS, NUM_IMAGE_TOKENS, shape, "float32",
        data.numpy().tobytes(),
    )  # fmt: skip


def chat(seed: int) -> Submit:
    """Twenty tokens, an image, and a tail: a step of 24 tokens ends inside of the image."""
    ids = [seed + 1] * 20 + [0] * NUM_IMAGE_TOKENS + [7] * 5
    return Submit(f"r{seed}", ids, Sampling(max_tokens=1), media=[image(seed, 20)])


def rules(engine: EngineCore, ledger: Ledger | None = None) -> set[str]:
    return {finding.rule for finding in run_audit(engine, ledger or Ledger())[2]}


def test_an_output_freed_early_stays_with_the_runner(make: Make, helpers: Any) -> None:
    engine = make("encoder_freed_early")
    assert engine.runner.outputs is not None
    sizes = []
    for seed in range(3):
        engine.submit(chat(seed))
        helpers.finish(engine)
        sizes.append(engine.runner.outputs.nbytes)
    assert sizes[0] > 0
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]
    assert count_lost_encoder_tokens(engine) == 3 * NUM_IMAGE_TOKENS
    assert rules(engine) == {"encoder_outputs_are_known", "idle_holds_no_encoder_output"}


@pytest.mark.parametrize(("text", "served"), [("", True), ("encoder_budget_held", False)])
def test_a_budget_that_aborts_keep_starves_the_next_image(
    text: str, served: bool, make: Make
) -> None:
    engine = make(text)
    for seed in range(2):
        engine.submit(chat(seed))
        engine.step()
        assert engine.abort(f"r{seed}")
    assert engine.scheduler.encoder is not None
    assert (engine.scheduler.encoder.used == 0) is served
    assert count_lost_encoder_tokens(engine) == (0 if served else 2 * NUM_IMAGE_TOKENS)
    engine.submit(chat(2))
    tokens = [token for _ in range(8) for token in engine.step().tokens]
    assert (len(tokens) == 1) is served
    engine.abort("r2")
    held = {"encoder_outputs_are_known", "idle_holds_no_encoder_output"}
    assert rules(engine) == (set() if served else held)


def test_an_encoder_cache_in_full_use_has_lost_nothing(make: Make) -> None:
    """A spent budget, prompts cut within an image, shared images, preemptions and aborts."""
    engine, used, ended = make(""), set(), 0
    cache = engine.scheduler.encoder
    assert cache is not None
    for number in range(16):
        submit = chat(number)
        submit.media[0].key = b"image %d" % (number % 5)
        engine.submit(submit)
    for turn in range(400):
        if not engine.has_work:
            break
        ended += len(engine.step().tokens)
        used.add(cache.used)
        assert count_lost_encoder_tokens(engine) == 0
        running = engine.scheduler.running
        if turn % 5 == 2 and running:
            engine.scheduler.preempt(running[-1])
        elif turn % 9 == 4 and running:
            engine.abort(running[-1].request_id)
        assert count_lost_encoder_tokens(engine) == 0
    assert not engine.has_work
    assert ended >= 8
    assert NUM_IMAGE_TOKENS in used, "no step ended within an image: the test shows nothing"


def test_an_image_that_only_an_abandoned_request_holds_is_lost(make: Make) -> None:
    engine = make("")
    engine.submit(chat(1))
    engine.step()
    assert count_lost_encoder_tokens(engine) == 0
    engine.abandoned = frozenset({"r1"})
    assert count_lost_encoder_tokens(engine) == NUM_IMAGE_TOKENS


@pytest.mark.parametrize(("text", "sound"), [("", True), ("media_kept", False)])
def test_a_receiver_that_hears_no_forgetting_grows_past_its_bound(
    text: str, sound: bool, make: Make, helpers: Any, model: Any
) -> None:
    engine, sender = make(text), MediaCacheSender(CAPACITY)
    ledger = Ledger([engine])
    for seed in range(4):
        packed = sender.omit_cached_media(chat(seed))
        assert isinstance(packed, Submit)
        engine.submit(packed)
        helpers.finish(engine)
    (entry,) = (one for one in ledger.list_entries() if one.owner == "receiver_cache")
    assert len(engine.receiver) == (2 if sound else 4)
    assert entry.bytes == engine.receiver.bytes
    assert rules(engine, ledger) == (set() if sound else {"ledger_within_bounds"})
    found = [
        (f.rule, f.detail) for f in compare_receiver_cache(sender, set(engine.receiver.list_keys()))
    ]
    told = [(RECEIVER_CACHE_RULE, "the worker has 2 media that the frontend did not send")]
    assert found == ([] if sound else told)
    engine.receiver.clear()  # a trim's step
    assert rules(engine, ledger) == set()


def test_an_output_that_is_dropped_and_wanted_again_in_one_step_stays() -> None:
    """A more urgent request with the same image takes the place of the one that held it."""
    image = [Media("image", b"x", 0, NUM_IMAGE_TOKENS, NUM_IMAGE_TOKENS, [1])]
    first, heir = (Request(n, array("i", [1] * 30), 30, Sampling(9), media=image) for n in "ab")
    cache = EncoderCache(2 * NUM_IMAGE_TOKENS)
    assert cache.reserve(first, 9) == (9, image)
    assert cache.take_freed_keys() == []
    cache.release_all(first)
    assert cache.reserve(heir, 9) == (9, []), "the runner has it still"
    assert cache.take_freed_keys() == []
    cache.release_all(heir)
    assert cache.take_freed_keys() == [b"x"]
    assert cache.reserve(first, 9) == (9, image)
    cache.release_all(first)  # before it was encoded
    assert cache.reserve(heir, 9) == (9, image)
    assert cache.take_freed_keys() == []
