"""What the demo's clients ask. The texts that answer them are decided by the prompts alone."""

from __future__ import annotations

PROMPTS = tuple(
    f"Tell me about {subject} in the {place}."
    for subject, place in (
        ("the water line", "harbour"),
        ("the cargo", "north"),
        ("the master", "morning"),
        ("the owners", "south"),
        ("the memory", "night"),
        ("the requests", "east"),
        ("the weights", "winter"),
        ("the cache", "west"),
        ("the sailors", "summer"),
        ("the insurers", "fresh water"),
        ("the buffers", "salt water"),
        ("the mark", "hull"),
    )
)
MAX_TOKENS = 128
"""A request takes a second or more: a restart meets most streams in the middle of one."""


def body(model: str, prompt: str) -> dict[str, object]:
    """Greedy, of a fixed length, streamed."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
