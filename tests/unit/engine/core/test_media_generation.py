"""Text about images and sounds equals transformers' own, whatever happens to a request on the way.

The processors' tensors are made once and given to both sides; test_media_processors.py compares the
processors themselves.

Tests ``core/execute/encoder_outputs.py``.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from PIL import Image

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.worker_ipc import Media, Sampling, Submit
from plimsoll_engine.models import loader
from plimsoll_engine.multimodal.clip import ClipProcessor
from plimsoll_engine.multimodal.whisper_features import WhisperProcessor
from plimsoll_faults.models.tiny_media import NUM_IMAGE_TOKENS, write_llava, write_whisper

NEW_TOKENS = 64
MakeMediaEngine = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_llava(folder)
    return folder


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    write_whisper(folder)
    return folder


def load(folder: Path) -> Any:
    torch.set_num_threads(1)
    config = loader.load_config(folder)
    return loader.load_model(folder, config, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def models(llava: Path, whisper: Path) -> Iterator[dict[str, Any]]:
    loaded = {"llava": load(llava), "whisper": load(whisper)}
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture
def make_engine(models: dict[str, Any]) -> Iterator[MakeMediaEngine]:
    """Engines over one of the models; each must pass the audit when it is idle at the end."""
    engines: list[EngineCore] = []

    def make(
        kind: str,
        num_blocks: int = 400,
        block_size: int = 4,
        seqs: int = 8,
        budget: int = 256,
        encoder_tokens: int = 400,
    ) -> EngineCore:
        model = models[kind]
        cache = EncoderCache(encoder_tokens, model.is_encoder_decoder)
        scheduler = Scheduler(BlockPool(num_blocks, block_size), seqs, budget, 440, cache)
        engine = EngineCore(Runner(model, num_blocks, block_size), scheduler)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        idle, _, findings = run_audit(engine, Ledger())
        assert (idle, findings) == (True, [])
        engine.runner.model = None  # it is shared: close() would take its tensors
        engine.close()


def picture(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((70 + seed, 64)).save(file, "PNG")
    return file.getvalue()


def sound(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    time = np.arange(int(16_000 * (0.2 + 0.07 * seed))) / 16_000
    wave = np.sum([np.sin(time * rng.uniform(200, 12_000)) for _ in range(5)], axis=0) / 8
    file = io.BytesIO()
    soundfile.write(file, wave.astype(np.float32), 16_000, format="WAV")
    return file.getvalue()


@pytest.fixture(scope="module")
def chats(llava: Path) -> dict[str, tuple[list[int], list[Media]]]:
    """Prompts with none, one or several images, some alike, some with a common beginning."""
    rng = random.Random(3)
    processor = ClipProcessor(llava)
    images = [processor.process(picture(seed)) for seed in range(5)]
    assert processor.placeholder is not None
    assert processor.placeholders == NUM_IMAGE_TOKENS

    def prompt(head: list[int], *chosen: int) -> tuple[list[int], list[Media]]:
        ids, media = list(head), []
        for number in chosen:
            media.append(images[number].to_media(len(ids), NUM_IMAGE_TOKENS, NUM_IMAGE_TOKENS))
            ids += [processor.placeholder] * NUM_IMAGE_TOKENS  # type: ignore[list-item]
            ids += [rng.randrange(3, 500) for _ in range(rng.randrange(1, 9))]
        return ids, media

    heads = [[rng.randrange(3, 500) for _ in range(n)] for n in (1, 9, 24)]
    found = {f"text-{n}": prompt(head) for n, head in enumerate(heads)}
    for n in range(5):
        found |= {f"one-{n}-{h}": prompt(head, n) for h, head in enumerate(heads)}
    found |= {f"two-{n}": prompt(heads[n % 3], n, (n + 1) % 5) for n in range(5)}
    found |= {f"same-{n}": prompt(heads[n], n, n) for n in range(3)}
    found |= {f"more-{n}": prompt(heads[n], 4, n, 3, 1) for n in range(3)}
    return found


@pytest.fixture(scope="module")
def expected_chats(
    llava: Path, chats: dict[str, tuple[list[int], list[Media]]]
) -> dict[str, list[int]]:
    model = transformers.LlavaForConditionalGeneration.from_pretrained(llava, dtype=torch.float32)
    found = {}
    for name, (ids, media) in chats.items():
        pixels = {"pixel_values": torch.stack([tensor(one) for one in media])} if media else {}
        out = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            **pixels,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        found[name] = out[0, len(ids) :].tolist()
    return found


def tensor(media: Media) -> torch.Tensor:
    assert media.data is not None
    return torch.frombuffer(bytearray(media.data), dtype=torch.float32).view(*media.shape)


def submit(name: str, ids: list[int], media: list[Media], tokens: int = NEW_TOKENS) -> Submit:
    return Submit(name, ids, Sampling(max_tokens=tokens, ignore_eos=True), media=media)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"budget": 7}, id="chunked"),
        pytest.param({"num_blocks": 48, "budget": 32}, id="preempted"),
        pytest.param({"encoder_tokens": NUM_IMAGE_TOKENS, "budget": 40}, id="one-image-at-a-time"),
        pytest.param(
            {"num_blocks": 52, "budget": 5, "seqs": 3, "encoder_tokens": 2 * NUM_IMAGE_TOKENS},
            id="chunked-and-preempted",
        ),
    ],
)
def test_text_about_images_equals_transformers(
    size: dict[str, int],
    chats: dict[str, tuple[list[int], list[Media]]],
    expected_chats: dict[str, list[int]],
    make_engine: MakeMediaEngine,
    helpers: Any,
    request: pytest.FixtureRequest,
) -> None:
    engine = make_engine("llava", **size)
    for name, (ids, media) in chats.items():
        assert engine.submit(submit(name, ids, media)) is None
    assert helpers.finish(engine) == expected_chats
    ids, media = chats["more-1"]
    engine.submit(submit("again", ids, media))  # a prefix hit
    assert helpers.finish(engine)["again"] == expected_chats["more-1"]
    assert engine.scheduler.prefix_hit_tokens_total > 0
    if "preempted" in request.node.callspec.id:
        assert engine.scheduler.preemptions_total > 0


def test_the_tiny_models_look_and_listen(
    expected_chats: dict[str, list[int]], expected_sounds: dict[str, list[int]]
) -> None:
    """Or the equalities would say nothing about the encoders."""
    for head in range(3):
        assert len({tuple(expected_chats[f"one-{image}-{head}"]) for image in range(5)}) == 5
    assert len({tuple(text) for text in expected_sounds.values()}) == len(expected_sounds)
    for text in [*expected_chats.values(), *expected_sounds.values()]:
        assert len(set(text)) > 12, "a loop"


SOUNDS = 8


@pytest.fixture(scope="module")
def sounds(whisper: Path) -> dict[str, tuple[list[int], list[Media]]]:
    """Sounds under two tasks each, with the prompt's tokens of Whisper."""
    processor = WhisperProcessor(whisper)
    found = {}
    for seed in range(SOUNDS):
        media = processor.process(sound(seed)).to_media(0, 0, processor.tokens)
        for task in (515, 516):
            found[f"{seed}-{task}"] = [512, 513, task, 517], [media]
    return found


@pytest.fixture(scope="module")
def expected_sounds(
    whisper: Path, sounds: dict[str, tuple[list[int], list[Media]]]
) -> dict[str, list[int]]:
    """By a plain greedy loop over transformers' forward: its generate() adds rules of its own."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        whisper, dtype=torch.float32
    ).eval()
    found = {}
    for name, (prompt, media) in sounds.items():
        features, ids = tensor(media[0])[None], torch.tensor([prompt])
        with torch.inference_mode():
            encoded = model.model.encoder(features)
            for _ in range(NEW_TOKENS):
                out = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False)
                ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
        found[name] = ids[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize(
    "size",
    [
        pytest.param({}, id="roomy"),
        pytest.param({"budget": 3}, id="chunked"),
        pytest.param({"num_blocks": 40, "budget": 16}, id="preempted"),
        pytest.param({"encoder_tokens": 50}, id="one-sound-at-a-time"),
        pytest.param(
            {"encoder_tokens": 120, "num_blocks": 30, "block_size": 1, "seqs": 3},
            id="blocks-of-one",
        ),
    ],
)
def test_transcripts_equal_transformers(
    size: dict[str, int],
    sounds: dict[str, tuple[list[int], list[Media]]],
    expected_sounds: dict[str, list[int]],
    make_engine: MakeMediaEngine,
    helpers: Any,
) -> None:
    engine = make_engine("whisper", **size)
    tokens = 20 if size.get("num_blocks", 400) == 30 else NEW_TOKENS
    for name, (ids, media) in sounds.items():
        assert engine.submit(submit(name, ids, media, tokens)) is None
    found = helpers.finish(engine)
    assert found == {name: text[:tokens] for name, text in expected_sounds.items()}


@pytest.mark.parametrize("kind", ["llava", "whisper"])
def test_logits_equal_transformers(
    kind: str,
    llava: Path,
    whisper: Path,
    models: dict[str, Any],
    chats: dict[str, tuple[list[int], list[Media]]],
    sounds: dict[str, tuple[list[int], list[Media]]],
    make_engine: MakeMediaEngine,
) -> None:
    """Every position's, of prompts computed in chunks of 9."""
    seen: list[torch.Tensor] = []
    engine = make_engine(kind, budget=9)
    model = engine.runner.model

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def forward(self, *arguments: Any) -> torch.Tensor:
            hidden = models[kind].forward(*arguments)
            seen.append(models[kind].compute_logits(hidden))
            return hidden  # type: ignore[no-any-return]

    engine.runner.model = Spy()
    for name in ("more-0", "two-2") if kind == "llava" else ("3-515", "7-516"):
        ids, media = (chats if kind == "llava" else sounds)[name]
        engine.submit(submit(name, ids, media, tokens=1))
        while engine.has_work:
            engine.step()
        with torch.inference_mode():
            if kind == "llava":
                reference = transformers.LlavaForConditionalGeneration.from_pretrained(llava)
                pixels = torch.stack([tensor(item) for item in media])
                wanted = reference(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]
            else:
                reference = transformers.WhisperForConditionalGeneration.from_pretrained(whisper)
                features = tensor(media[0])[None]
                wanted = reference(features, decoder_input_ids=torch.tensor([ids])).logits[0]
        ours = torch.cat(seen)
        assert ours.shape == wanted.shape
        assert (ours - wanted).abs().max() < 1e-4
        seen.clear()
        engine.pool.reset_prefix_cache()


def findings(engine: EngineCore) -> set[str]:
    return {finding.rule for finding in run_audit(engine, Ledger())[2]}


def test_outputs_freed_in_the_step_that_makes_them_are_found(
    sounds: dict[str, tuple[list[int], list[Media]]],
    make_engine: MakeMediaEngine,
    helpers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real bug put back: the runner is told to free before it has made, so nobody frees."""
    engine = make_engine("whisper")
    cache, outputs = engine.scheduler.encoder, engine.runner.outputs
    assert cache is not None
    assert outputs is not None
    reserve = cache.reserve

    def reserve_and_free(request: Request, count: int) -> tuple[int, list[Media]]:
        found = reserve(request, count)
        cache.release_all(request)
        outputs.free(cache.take_freed_keys())
        return found

    monkeypatch.setattr(cache, "reserve", reserve_and_free)
    engine.submit(submit("a", *next(iter(sounds.values())), 1))
    helpers.finish(engine)
    assert findings(engine) == {"encoder_outputs_are_known", "idle_holds_no_encoder_output"}
    outputs.free(list(outputs._tensors))


def test_outputs_that_an_idle_engine_keeps_are_found(
    chats: dict[str, tuple[list[int], list[Media]]],
    make_engine: MakeMediaEngine,
    helpers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real bug put back: what was released is told with the next step, and none follows."""
    engine = make_engine("llava")
    with monkeypatch.context() as bug:
        bug.setattr(engine, "_free_outputs", lambda: None)
        engine.submit(submit("a", *chats["one-0-0"], 1))
        helpers.finish(engine)
    assert findings(engine) == {"idle_holds_no_encoder_output"}
    engine.submit(submit("b", *chats["one-0-0"], 1))
    helpers.finish(engine)
    assert findings(engine) == set()
