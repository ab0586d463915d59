"""``plimsoll bench``: send requests to an OpenAI endpoint and measure latency and throughput."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from plimsoll_cli.errors import RunError
from plimsoll_cli.figures import compute_percentile

REQUEST_TIMEOUT_S = 600.0
PROMPT = "Write a short story about a ship that carries more than its mark allows. "


@dataclass
class RequestTiming:
    """Times of one request and of its chunks, in monotonic seconds."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds; None if no chunk arrived."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True)
class LoadProfile:
    """Number, concurrency and parameters of the requests to send."""

    url: str
    model: str
    count: int
    concurrency: int
    max_tokens: int
    api_key: str | None = None


async def run_load(
    load: LoadProfile, on_done: Callable[[], None]
) -> tuple[list[RequestTiming], float]:
    """Send all requests, and return their timings and the total duration in seconds.

    Raises RunError if all requests fail.
    """
    limit = asyncio.Semaphore(load.concurrency)
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.concurrency)
    async with httpx.AsyncClient(
        timeout=REQUEST_TIMEOUT_S, headers=headers, limits=limits
    ) as client:
        begin = time.perf_counter()

        async def send_when_free(request_number: int) -> RequestTiming:
            async with limit:
                timing = await _send_request(client, load, request_number)
            on_done()
            return timing

        found = await asyncio.gather(*(send_when_free(number) for number in range(load.count)))
        total_s = time.perf_counter() - begin
    if all(timing.error for timing in found):
        raise RunError(f"{load.url}: all requests failed; the first error is: {found[0].error}")
    return list(found), total_s


async def _send_request(
    client: httpx.AsyncClient, load: LoadProfile, request_number: int
) -> RequestTiming:
    # Different first tokens avoid hits in the prefix cache.
    body = {
        "model": load.model, "prompt": f"{request_number}: {PROMPT}", "max_tokens": load.max_tokens,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    timing = RequestTiming(time.perf_counter())
    try:
        async with client.stream("POST", f"{load.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                timing.error = f"HTTP {answer.status_code}: {text[:300]}"
                return timing
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _record_chunk(timing, json.loads(line.removeprefix("data: ")))
    except (httpx.HTTPError, ValueError) as error:
        timing.error = str(error) or type(error).__name__
    return timing


def _record_chunk(timing: RequestTiming, chunk: dict[str, Any]) -> None:
    choices = chunk.get("choices") or []
    if choices and choices[0].get("text"):
        timing.chunks.append(time.perf_counter())
    if chunk.get("usage"):
        timing.tokens = chunk["usage"].get("completion_tokens")


def summarize_timings(
    timings: list[RequestTiming], duration_s: float
) -> dict[str, float | int | None]:
    """Return percentiles, counts and throughput by name; unknown values are None."""
    good = [timing for timing in timings if timing.error is None]
    ttft = [timing.ttft_s for timing in good if timing.ttft_s is not None]
    gaps = [gap for timing in good for gap in timing.gaps_s]
    tokens = [timing.tokens for timing in good if timing.tokens is not None]
    whole = [timing.chunks[-1] - timing.sent for timing in good if timing.chunks]
    values: dict[str, float | int | None] = {
        "request_count": len(timings),
        "failed_count": len(timings) - len(good),
        "duration_s": duration_s,
        "output_token_count": sum(tokens) if tokens else None,
        "output_tok_s": sum(tokens) / duration_s if tokens else None,
    }
    for name, series in (("ttft", ttft), ("itl", gaps), ("latency", whole)):
        for fraction in (0.5, 0.9, 0.99):
            values[f"{name}_p{fraction * 100:.0f}_s"] = compute_percentile(series, fraction)
    return values
