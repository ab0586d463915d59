"""In what two answers to one body differ, and who is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.bodies import Body

OURS, THEIRS, BOTH = "this engine", "vLLM", "both"


@dataclass
class Answer:
    """What a client sees; ``told`` is of an error, and ``usage`` of prompt and output."""

    status: int
    told: str = ""
    texts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    usage: tuple[int | None, int | None] | None = None


def between(body: Body, ours: Answer, theirs: Answer) -> list[tuple[str, Any, Any]]:
    """Return each aspect that differs with both values.

    Where tokens are drawn at random, and where each server takes its own way through a grammar,
    what hangs on them is not compared.
    """
    if ours.status != theirs.status:
        told = (f"{ours.status} {ours.told}".strip(), f"{theirs.status} {theirs.told}".strip())
        return [("status", *told)]
    if ours.status != 200:
        return []
    pairs: list[tuple[str, Any, Any]] = []
    if ours.usage and theirs.usage:
        pairs.append(("prompt tokens", ours.usage[0], theirs.usage[0]))
    else:
        pairs.append(("usage", bool(ours.usage), bool(theirs.usage)))
    if body.greedy:
        pairs.append(("finish reason", ours.reasons, theirs.reasons))
        pairs.append(("calls", _names(ours), _names(theirs)))
        if not body.constrained:
            pairs.append(("text", ours.texts, theirs.texts))
            if ours.usage and theirs.usage:
                pairs.append(("output tokens", ours.usage[1], theirs.usage[1]))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _names(answer: Answer) -> list[str]:
    return [call.partition("(")[0] for call in answer.calls]


Fits = Callable[[Body, str, Answer, Answer], bool]


def _has(*names: str) -> Fits:
    """Whether the body has one of these fields."""
    return lambda body, *_: any(name in body.fields for name in names)


def _null(body: Body, aspect: str, ours: Answer, theirs: Answer) -> bool:
    """Whether vLLM refuses a null."""
    return (ours.status, theirs.status) == (200, 400) and "'input': 'None'" in theirs.told


def _says(text: str) -> Fits:
    """Whether vLLM's error has these words."""
    return lambda body, aspect, ours, theirs: text in theirs.told


def _refused(text: str) -> Fits:
    """Whether our error has these words."""
    return lambda body, aspect, ours, theirs: text in ours.told


def _cut(body: Body, aspect: str, ours: Answer, theirs: Answer) -> bool:
    """Whether a text ends within a character."""
    return aspect == "text" and [one.rstrip("\ufffd") for one in ours.texts] == theirs.texts


def _constrained(body: Body, aspect: str, ours: Answer, theirs: Answer) -> bool:
    """Whether only the end of a constrained text differs, or how many calls are in it."""
    same = set(_names(ours)) == set(_names(theirs))
    return body.constrained and aspect in ("finish reason", "calls") and same


def _echo_alone(body: Body, aspect: str, ours: Answer, theirs: Answer) -> bool:
    return aspect == "output tokens" and body.fields.get("max_tokens") == 0


def _named_call(body: Body, aspect: str, ours: Answer, theirs: Answer) -> bool:
    return (aspect, ours.reasons, theirs.reasons) == ("finish reason", ["tool_calls"], ["stop"])


Rule = tuple[Fits, str, str]
RULES: tuple[Rule, ...] = (
    (_null, OURS, "null stands for a default, as clients send it"),
    (_says("n must be 1 when using greedy"), OURS, "OpenAI takes `n` with a temperature of 0"),
    (_says("`tools` must not be an empty array"), OURS, "clients send an empty list for no tools"),
    (
        _says("When using `tool_choice`, `tools` must"),
        OURS,
        "`tool_choice: auto` without tools asks for nothing",
    ),
    (_says("input_value='input_text'"), OURS, "parts of `/v1/responses` are texts in chats, too"),
    (
        _refused("content of a message of role user is null"),
        OURS,
        "OpenAI demands the content of a user's message",
    ),
    (
        _says("TextEncodeInput must be Union"),
        OURS,
        "half of a character, which JavaScript and Python write, becomes U+FFFD",
    ),
    (_has("functions"), OURS, "vLLM drops `functions` in silence"),
    (_refused("best_of is not supported"), OURS, "vLLM drops `best_of` in silence"),
    (_refused("use_beam_search is not supported"), BOTH, "beam search is not built"),
    (
        _refused("tools of type 'web_search"),
        OURS,
        "vLLM drops tools that only OpenAI runs in silence; here a flag does",
    ),
    (_has("previous_response_id"), BOTH, "no response is stored: 400 here, 404 there"),
    (
        _refused("is not in the vocabulary"),
        OURS,
        "a number that is no token is an error",
    ),
    (_refused("cannot be combined"), OURS, "vLLM answers two bounds of one text with a 500"),
    (
        _refused("spaces_between_special_tokens"),
        BOTH,
        "spaces between special tokens that are shown cannot be left out",
    ),
    (_echo_alone, OURS, "vLLM counts the token that it generates and leaves out"),
    (
        _named_call,
        BOTH,
        "the API's reference says `tool_calls`; OpenAI answers a named tool with"
        " `stop`, as vLLM does",
    ),
    (_constrained, BOTH, "of several texts that a grammar allows, each engine writes its own"),
    (_cut, BOTH, "the last tokens are a part of a character: shown as U+FFFD here, left out there"),
)
"""The first that fits tells who is right, and why."""


def reason(body: Body, aspect: str, ours: Answer, theirs: Answer) -> tuple[str, str]:
    """Return who is right about a difference and why; empty where no rule fits."""
    for fits, right, why in RULES:
        if fits(body, aspect, ours, theirs):
            return right, why
    return "", ""
