"""The clients of a recording: so many requests a second of one shape, phase after phase.

They are an open loop: what is slow does not slow them down, up to :data:`MOST_AT_ONCE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from leaklab import clients
from leaklab.clients import Shape, body, complete, prompt, stream

TIMEOUT_S, PATIENCE_S, EARLY_S = 60.0, 0.4, 0.15
MOST_AT_ONCE = 120
IDLE_S = 2.0
"""How long an unused connection stays open: less than the 5 s after which servers close theirs."""
ANSWER_TOKENS, LONG_TOKENS = 32, 320
LONGEST_PROMPT = 1500
"""Words of a prompt that grows: some 2,300 tokens."""
GROWTH = 1.0
"""Words by which each prompt is longer than the one before."""
ADAPTERS = 6
OUTPUT_KEYS = 24
"""Properties of a schema of structured output."""
SCHEMAS = 6
CHATS, TURNS, TURN_WORDS = 24, 32, 28
SEESAW = 240
"""Prompts between two of the shortest."""
VOLUMES = 120


@dataclass(frozen=True)
class Phase:
    """``per_s`` requests a second of ``shape``, for ``seconds``."""

    seconds: float
    per_s: float
    shape: str


Load = tuple[Phase, ...]
"""Phases, again and again."""


class Crowd:
    """``counts`` are the requests by their ends: ``answered``, ``left``, ``failed``, and ``unsent``
    where :data:`MOST_AT_ONCE` were already waiting."""

    def __init__(self, url: str, load: Load, adapters: Sequence[Path] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._url, self._load = url, load
        self._shapes = clients.SHAPES | SHAPES | {"adapters": Adapters(adapters)}
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Until it is cancelled."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
        async with (
            httpx.AsyncClient(
                base_url=self._url, timeout=TIMEOUT_S, trust_env=False, limits=limits
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            waiting: set[asyncio.Task[None]] = set()
            for phase in itertools.cycle(self._load):
                end = due = time.monotonic()
                end += phase.seconds
                while phase.per_s and due < end:
                    if len(waiting) < MOST_AT_ONCE:
                        task = group.create_task(self._one(client, self._shapes[phase.shape]))
                        waiting.add(task)
                        task.add_done_callback(waiting.discard)
                    else:
                        self.counts["unsent"] += 1
                    due += 1 / phase.per_s
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                await asyncio.sleep(max(0.0, end - time.monotonic()))

    async def _one(self, client: httpx.AsyncClient, shape: Shape) -> None:
        try:
            finished = await shape(client, next(self._numbers))
        except (httpx.HTTPError, clients.BrokenStream) as error:
            self.counts["failed"] += 1
            self.last_error = f"{type(error).__name__}: {error} {_said(error)}"[:500]
        else:
            self.counts["answered" if finished else "left"] += 1


def _said(error: Exception) -> str:
    """What the server said of it; a stream that was refused was not read."""
    if isinstance(error, httpx.HTTPStatusError):
        with contextlib.suppress(httpx.ResponseNotRead):
            return error.response.text
    return ""


# ---- shapes, beside those of the leak lab: true where the request ran to its end


async def answers(client: httpx.AsyncClient, number: int) -> bool:
    return await complete(client, body(prompt(number, 24), ANSWER_TOKENS))


async def long(client: httpx.AsyncClient, number: int) -> bool:
    return await complete(client, body(prompt(number, 60), LONG_TOKENS))


async def growing(client: httpx.AsyncClient, number: int) -> bool:
    """Each prompt is longer than the one before."""
    words = min(LONGEST_PROMPT, 16 + int(GROWTH * number))
    return await complete(client, body(prompt(number, words), 8))


async def stepped(client: httpx.AsyncClient, number: int) -> bool:
    """Prompts that grow by bursts: 90 of the same length, then all of them longer."""
    words = min(LONGEST_PROMPT // 3, 16 * 2 ** (number // 90))
    return await complete(client, body(prompt(number, words), 8))


async def seesaw(client: httpx.AsyncClient, number: int) -> bool:
    """Prompts that get longer and shorter again, each time up to a greater length."""
    turn, place = divmod(number, SEESAW)
    share = 1.0 - abs(2.0 * place / SEESAW - 1.0)
    words = 16 + int(min(LONGEST_PROMPT // 2, 150 * (1 + turn)) * share)
    return await complete(client, body(prompt(number, words), 8))


async def documents(client: httpx.AsyncClient, number: int) -> bool:
    """Each 40th prompt is a document, of up to 600 words; all others are short."""
    turn, place = divmod(number, 40)
    words = min(600, 150 + 50 * turn) if place == 0 else 16
    return await complete(client, body(prompt(number, words), 16))


async def articles(client: httpx.AsyncClient, number: int) -> bool:
    """Prompts of 150 to 900 words, in no order, and short answers."""
    words = int(150 * 6 ** random.Random(number).random())
    return await complete(client, body(prompt(number, words), 16))


async def volumes(client: httpx.AsyncClient, number: int) -> bool:
    """Of each 120 prompts, the last 30 are long ones, and each time longer, up to a bound."""
    turn, place = divmod(number, VOLUMES)
    words = min(900, 150 * (1 + turn)) if place >= VOLUMES // 4 * 3 else 24
    return await complete(client, body(prompt(number, words), 16))


async def prompt_scores(client: httpx.AsyncClient, number: int) -> bool:
    """The probabilities of each token of the prompt, and of three others."""
    wish = body(prompt(number, 8 + number % 32), 8, prompt_logprobs=3)
    return await complete(client, wish)


async def chats(client: httpx.AsyncClient, number: int) -> bool:
    """Chats whose prompt has all that was said before, up to a number of turns; then new ones."""
    turn, chat = divmod(number, CHATS)
    words = 20 + TURN_WORDS * (turn % TURNS)
    return await complete(client, body(prompt(CHATS * (turn // TURNS) + chat, words), 8))


async def leaving(client: httpx.AsyncClient, number: int) -> bool:
    """Every other client leaves in the middle of its answer."""
    if number % 2 == 0:
        return await answers(client, number)
    return await _leave(client, body(prompt(number, 24), 2000), PATIENCE_S)


async def leaving_early(client: httpx.AsyncClient, number: int) -> bool:
    """Every other client leaves while its prompt is computed, long before its first token."""
    if number % 2 == 0:
        return await answers(client, number)
    return await _leave(client, body(prompt(number, LONGEST_PROMPT), 8), EARLY_S)


async def _leave(client: httpx.AsyncClient, wish: dict[str, object], after_s: float) -> bool:
    """Leave after so many seconds; HTTPStatusError where it is refused before."""
    try:
        answer = await client.post("/v1/completions", json=wish, timeout=after_s)
    except httpx.TimeoutException:
        return False
    answer.raise_for_status()
    return True


async def mixed(client: httpx.AsyncClient, number: int) -> bool:
    """Prompts of 4 to 300 words and answers of 2 to 100 tokens, in no order."""
    lengths = random.Random(number)
    words, tokens = int(4 * 75 ** lengths.random()), int(2 * 50 ** lengths.random())
    return await complete(client, body(prompt(number, words), tokens))


async def several(client: httpx.AsyncClient, number: int) -> bool:
    """Three choices of one prompt, read to their end."""
    wish = body(prompt(number, 24), ANSWER_TOKENS, n=3, temperature=0.8, seed=number)
    return await complete(client, wish)


async def logprobs(client: httpx.AsyncClient, number: int) -> bool:
    """The probabilities of each token and of five others."""
    return await complete(client, body(prompt(number, 24), ANSWER_TOKENS, logprobs=5))


async def streaming(client: httpx.AsyncClient, number: int) -> bool:
    """Three of four answers come as a stream, which is read to its end."""
    if number % 4 == 0:
        return await answers(client, number)
    await stream(client, prompt(number, 24), ANSWER_TOKENS)
    return True


async def scored(client: httpx.AsyncClient, number: int) -> bool:
    """Prompts and answers of many lengths. Every other client asks for the probabilities of the
    tokens, and of up to ten others."""
    lengths = random.Random(number)
    words, tokens = int(8 * 20 ** lengths.random()), int(4 * 16 ** lengths.random())
    more = {"logprobs": lengths.choice((1, 3, 5, 10))} if number % 2 else {}
    return await complete(client, body(prompt(number, words), tokens, **more))


async def streams_cut(client: httpx.AsyncClient, number: int) -> bool:
    """All answers come as a stream, and one of six clients leaves in the middle of it."""
    if number % 6:
        await stream(client, prompt(number, 24), ANSWER_TOKENS)
        return True
    wish = body(prompt(number, 24), LONG_TOKENS, stream=True)
    async with client.stream("POST", "/v1/completions", json=wish) as answer:
        answer.raise_for_status()
        lines = 0
        async for line in answer.aiter_lines():
            lines += line.startswith("data: {")
            if lines == ANSWER_TOKENS:
                return False
    return True


async def grammars(client: httpx.AsyncClient, number: int) -> bool:
    """Structured output, by a schema that no other number has."""
    return await _by_schema(client, number, number)


async def few_grammars(client: httpx.AsyncClient, number: int) -> bool:
    """Structured output, by one of a few schemas."""
    return await _by_schema(client, number, number % SCHEMAS)


async def _by_schema(client: httpx.AsyncClient, number: int, schema_number: int) -> bool:
    keys = {f"key_{schema_number}_{i}": {"type": "string"} for i in range(OUTPUT_KEYS)}
    schema = {"type": "object", "properties": keys, "required": list(keys)}
    how = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    wish = body(prompt(number, 24), ANSWER_TOKENS, response_format=how)
    del wish["ignore_eos"]
    return await complete(client, wish)


async def features(client: httpx.AsyncClient, number: int) -> bool:
    """One feature or another for each request, at random."""
    shapes = (several, logprobs, streaming, few_grammars, leaving)
    return await random.Random(number).choice(shapes)(client, number)


async def blended(client: httpx.AsyncClient, number: int) -> bool:
    """What a service gets on any day: mostly short answers and streams, and now and then others."""
    shapes = (answers, streaming, mixed, logprobs, leaving)
    shape = random.Random(number).choices(shapes, weights=(8, 6, 4, 1, 1))[0]
    return await shape(client, number)


class Adapters:
    """Answers of LoRA adapters, of which one after the other is loaded and unloaded again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    async def __call__(self, client: httpx.AsyncClient, number: int) -> bool:
        turn, place = divmod(number, 20)
        if place == 0:
            folder = self._folders[turn % len(self._folders)]
            where = {"lora_name": f"adapter-{turn}", "lora_path": str(folder)}
            (await client.post("/v1/load_lora_adapter", json=where)).raise_for_status()
            if turn >= ADAPTERS:
                old = {"lora_name": f"adapter-{turn - ADAPTERS}"}
                await client.post("/v1/unload_lora_adapter", json=old)
        known = max(0, turn - 1 - number % 3) if turn else 0
        wish = body(prompt(number, 24), ANSWER_TOKENS)
        return await complete(client, wish | ({"model": f"adapter-{known}"} if turn else {}))


SHAPES: dict[str, Shape] = {
    one.__name__: one
    for one in (
        answers, long, growing, stepped, seesaw, documents, leaving, leaving_early, mixed, several,
        logprobs, streaming, grammars, few_grammars, chats, features, articles, scored,
        streams_cut, blended, volumes, prompt_scores,
    )
}  # fmt: skip
