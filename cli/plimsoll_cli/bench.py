"""``plimsoll bench``: load on an OpenAI endpoint, and what clients saw of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from plimsoll_cli.errors import RunError
from plimsoll_cli.figures import percentile

REQUEST_S = 600.0
PROMPT = "Write a short story about a ship that carries more than its mark allows. "


@dataclass
class Seen:
    """One request by its client's clock. Seconds; None where nothing came."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Return the seconds from sending to the first chunk; None where none came."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def gaps_s(self) -> list[float]:
        """Return the seconds between each two chunks."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True)
class LoadProfile:
    """``count`` requests, at most ``at_once`` of them under way."""

    url: str
    model: str
    count: int
    at_once: int
    max_tokens: int
    api_key: str | None = None


async def run(load: LoadProfile, done: Callable[[], None]) -> tuple[list[Seen], float]:
    """Every request and the seconds they took together. RunError where none succeeded."""
    limit = asyncio.Semaphore(load.at_once)
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.at_once)
    async with httpx.AsyncClient(timeout=REQUEST_S, headers=headers, limits=limits) as client:
        begin = time.perf_counter()

        async def one(number: int) -> Seen:
            async with limit:
                seen = await _one(client, load, number)
            done()
            return seen

        found = await asyncio.gather(*(one(number) for number in range(load.count)))
        took = time.perf_counter() - begin
    if all(seen.error for seen in found):
        raise RunError(f"{load.url}: no request succeeded: {found[0].error}")
    return list(found), took


async def _one(client: httpx.AsyncClient, load: LoadProfile, number: int) -> Seen:
    # Different from the first token on, so that the prefix cache answers nothing.
    body = {
        "model": load.model, "prompt": f"{number}: {PROMPT}", "max_tokens": load.max_tokens,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    seen = Seen(time.perf_counter())
    try:
        async with client.stream("POST", f"{load.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                seen.error = f"HTTP {answer.status_code}: {text[:300]}"
                return seen
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _take(seen, json.loads(line.removeprefix("data: ")))
    except (httpx.HTTPError, ValueError) as error:
        seen.error = str(error) or type(error).__name__
    return seen


def _take(seen: Seen, chunk: dict[str, Any]) -> None:
    choices = chunk.get("choices") or []
    if choices and choices[0].get("text"):
        seen.chunks.append(time.perf_counter())
    if chunk.get("usage"):
        seen.tokens = chunk["usage"].get("completion_tokens")


def figures(found: list[Seen], took_s: float) -> dict[str, float | int | None]:
    """Keys with their units; None where nothing was measured."""
    good = [seen for seen in found if seen.error is None]
    ttft = [seen.ttft_s for seen in good if seen.ttft_s is not None]
    gaps = [gap for seen in good for gap in seen.gaps_s]
    tokens = [seen.tokens for seen in good if seen.tokens is not None]
    whole = [seen.chunks[-1] - seen.sent for seen in good if seen.chunks]
    values: dict[str, float | int | None] = {
        "request_count": len(found),
        "failed_count": len(found) - len(good),
        "duration_s": took_s,
        "output_token_count": sum(tokens) if tokens else None,
        "output_tok_s": sum(tokens) / took_s if tokens else None,
    }
    for name, series in (("ttft", ttft), ("itl", gaps), ("latency", whole)):
        for share in (0.5, 0.9, 0.99):
            values[f"{name}_p{share * 100:.0f}_s"] = percentile(series, share)
    return values
