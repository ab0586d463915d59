"""The soak's clients: short requests of text, with an image, of a sound or with a grammar.

Some are given up.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import soundfile
from PIL import Image

from plimsoll_engine.api import chat_images
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.media_reader import MAX_WAITING_FILES
from plimsoll_engine.frontend.requests.request_log import Delta, Generation, RequestFailedError
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.multimodal.processor import ProcessedMedia

VOCABULARY = 500
"""Of the tiny models' 512 tokens, the special ones left out."""
ABORTED = 0.2
FILES = 1024
"""Different images, and as many sounds: many times what the caches hold."""
POPULAR = 8
"""Files that half of the requests bring, as users do that ask again."""
SIDE = 32
RATE, SECONDS = 16_000, 0.25
STALL_S = 120.0
WRONG = 0.4
"""Of the requests with a grammar: it is refused."""
GRAMMARS = 24
"""Different ones that are not refused. A grammar's lexer keeps each state that an output has
reached: of one such expression 80 kB over the first thousand outputs, which the cache charges from
the start as 96 KiB. Growth that remains after the warm-up is in part of this kind."""


class Clients:
    """``shares`` are those of each kind of request, which goes to its kind's engine: to see an
    ``image``, to hear ``audio``, with a ``grammar``, and texts for any other. ``tokens`` is the
    longest output."""

    def __init__(
        self, engines: dict[str, AsyncEngine], shares: dict[str, float], tokens: int, seed: int
    ) -> None:
        self._engines, self._shares, self._tokens = engines, shares, tokens
        self._rng = random.Random(seed)
        self._images = [_image(number) for number in range(FILES if "image" in shares else 0)]
        self._sounds = [_sound(number) for number in range(FILES if "audio" in shares else 0)]
        self._reading = asyncio.Semaphore(
            MAX_WAITING_FILES
        )  # of each engine; more would be refused
        self.done: Counter[str] = Counter()
        self.aborted = self.refused = 0

    async def run(self, numbers: range, concurrency: int) -> None:
        """Requests with these numbers, ``concurrency`` at a time."""
        left = iter(numbers)
        await asyncio.gather(*(self._client(left) for _ in range(concurrency)))

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            (kind,) = self._rng.choices(list(self._shares), list(self._shares.values()))
            aborted = self._rng.random() < ABORTED
            async with asyncio.timeout(STALL_S):
                await self._request(kind, number, aborted)
            self.done[kind] += 1
            self.aborted += aborted

    async def _request(self, kind: str, number: int, aborted: bool) -> None:
        if aborted and kind in ("image", "audio") and self._rng.random() < 0.25:
            await self._leave_early(kind)
            return
        engine = self._engines[kind]
        ids, media = await self._prompt(kind)
        sampling = worker_ipc.Sampling(
            max_tokens=self._rng.randint(1, self._tokens),
            temperature=self._rng.choice((0.0, 0.0, 0.0, 1.0)),
            seed=number,
            ignore_eos=True,
            grammar=self._grammar(number) if kind == "grammar" else None,
        )
        name = f"soak-{number}"
        generation = Generation(
            name, ids, sampling, engine.tokenizer.create_detokenizer_factory(ids)(), media=media
        )
        with engine.track_running(generation):
            try:
                if aborted:
                    await self._leave(generation)
                else:
                    while (await _delta(generation)).finish_reason is None:
                        pass
            except RequestFailedError as error:
                if kind != "grammar" or error.reason != "invalid":
                    raise
                self.refused += 1

    def _grammar(self, number: int) -> worker_ipc.Grammar:
        """One that is wrong, or one of a few."""
        if self._rng.random() < WRONG:
            wrong = (
                worker_ipc.Grammar("regex", f"({number}"),
                worker_ipc.Grammar("json_schema", '{"type": 3}'),
                worker_ipc.Grammar("lark", "start: no"),
            )
            return self._rng.choice(wrong)
        return worker_ipc.Grammar("regex", f"(.|\n){{0,40}}{self._rng.randrange(GRAMMARS)}")

    async def _leave_early(self, kind: str) -> None:
        """While the file is decoded."""
        reading = asyncio.ensure_future(self._prompt(kind))
        await asyncio.sleep(self._rng.random() * 0.005)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _leave(self, generation: Generation) -> None:
        match self._rng.randrange(3):
            case 0:
                pass  # between its registration and its submission's arrival
            case 1:
                await asyncio.sleep(self._rng.random() * 0.02)
            case 2:
                await _delta(generation)

    async def _prompt(self, kind: str) -> tuple[list[int], list[worker_ipc.Media]]:
        if kind == "audio":
            return await self._heard()
        # One in four shares its beginning with others, so that cached blocks are shared, too.
        ids = [5] * 32 if self._rng.random() < 0.25 else []
        media: list[worker_ipc.Media] = []
        if kind == "image":
            reader = self._engines[kind].media
            sees = reader.processors.image
            assert sees is not None
            assert sees.placeholder is not None
            image = self._images[self._file()]
            async with self._reading:
                ids, media = await chat_images.expand_placeholders(
                    reader, sees, [*ids, sees.placeholder], [image]
                )
        ids += [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(1, 24))]
        return ids, media

    async def _heard(self) -> tuple[list[int], list[worker_ipc.Media]]:
        reader = self._engines["audio"].media
        hears, speech = reader.processors.audio, reader.processors.speech
        assert hears is not None
        assert speech is not None
        async with self._reading:
            sound: ProcessedMedia = await reader.read(hears, self._sounds[self._file()])
        ids = speech.build_token_ids(self._rng.choice(speech.languages))
        return ids, [sound.to_media(0, hears.placeholders, hears.tokens)]

    def _file(self) -> int:
        return self._rng.randrange(POPULAR if self._rng.random() < 0.5 else FILES)


async def _delta(generation: Generation) -> Delta:
    """The text since the last call, as soon as there is any."""
    while (delta := generation.take()) is None:
        generation.wake.clear()
        await generation.wake.wait()
    return delta


def _image(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _sound(number: int) -> bytes:
    noise = np.random.default_rng(number).uniform(-0.5, 0.5, int(RATE * SECONDS))
    file = io.BytesIO()
    soundfile.write(file, noise.astype(np.float32), RATE, format="WAV")
    return file.getvalue()
