"""Tenants who take more than their share: of the compiler, the queue, the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request

from bench.abuse_connections import LONG, connections
from bench.abuse_scene import HOST, Class, Played, Scene, ask, at_once, request

LOWEST = -(1 << 31)
GRAMMAR_CHARACTERS = 60_000


async def grammars(scene: Scene) -> Played:
    """Distinct grammars of 60 KB, each slow to compile."""
    played = Played()
    count = scene.many(30, 6)
    wanted = (lark(number) for number in range(count))
    played.saw(
        await at_once(
            ask(scene, "/v1/completions", {
                "model": scene.model, "prompt": "a", "max_tokens": 4,
                "structured_outputs": {"grammar": text}, "deadline_s": 60,
            })
            for text in wanted
        )
    )  # fmt: skip
    return played


def lark(number: int) -> str:
    """Optional characters one after the other: as many states as there are pairs of them."""
    line = f'start: "{number}" ' + 'A? "b"? ' * (GRAMMAR_CHARACTERS // 8)
    return line[: GRAMMAR_CHARACTERS - 20].rpartition(" ")[0] + "\nA: /[a-c]/\n"


async def regular_expressions(scene: Scene) -> Played:
    played = Played()
    played.saw(
        await at_once(
            ask(scene, "/v1/completions", {
                "model": scene.model, "prompt": "a", "max_tokens": 4, "deadline_s": 60,
                "structured_outputs": {"regex": f"({number}|[a-z]{{1,40}}){{1,{99 + number}}}" * 9},
            })
            for number in range(scene.many(30, 6))
        )
    )  # fmt: skip
    return played


async def priorities(scene: Scene) -> Played:
    """Streams that say that they come first."""
    content = json.dumps({"model": scene.model, **LONG, "priority": LOWEST}).encode()
    sent = request(scene, "/v1/completions", content)
    rounds = scene.many(4, 1)
    count = 24
    for _ in range(rounds):
        async with connections(scene.port, count) as pairs:
            for _, writer in pairs:
                writer.write(sent)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(scene.hold_s(15)):
                    await asyncio.gather(*(reader.read() for reader, _ in pairs))
    return Played(attempts=count * rounds)


async def metric_series(scene: Scene) -> Played:
    """Names that a careless server would make labels of."""
    played, before = Played(), await asyncio.to_thread(_series, scene)
    for number in range(scene.many(300, 30)):
        name = f"name-{number}"
        played.saw(
            await at_once([
                ask(scene, "/v1/completions", {"model": name, "prompt": "a"}),
                ask(scene, f"/v1/{name}", {}),
                ask(scene, "/v1/completions", {"model": scene.model, "prompt": "a", "user": name,
                                               "max_tokens": 1, "cache_salt": name}),
            ])
        )  # fmt: skip
    after = await asyncio.to_thread(_series, scene)
    played.figures["series_added_count"] = after - before
    return played


def _series(scene: Scene) -> int:
    with urllib.request.urlopen(f"http://{HOST}:{scene.port}/metrics", timeout=30) as page:
        return sum(not line.startswith(b"#") for line in page)


CLASSES: dict[str, Class] = {
    one.__name__: one for one in (grammars, regular_expressions, priorities, metric_series)
}
