"""From a body's fields to how tokens are chosen. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType

from plimsoll_engine.api.errors import invalid
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.messages.worker_ipc import Grammar, Sampling

SEED_MASK = (1 << 63) - 1


def sampling(
    body: CompletionRequest | ChatRequest,
    max_tokens: int,
    eos_ids: list[int],
    vocab_size: int,
    grammar: Grammar | None,
    bad_words: list[list[int]],
    defaults: Mapping[str, float] = MappingProxyType({}),
) -> Sampling:
    """Return how a body wants its tokens chosen; raise ApiError where a field is wrong.

    ``bad_words`` are its own as tokens. ``defaults`` are the checkpoint's for fields that it leaves
    out; where there is none, OpenAI's: every token at temperature 1.
    """
    if (body.min_tokens or 0) > max_tokens:
        raise invalid(
            f"min_tokens {body.min_tokens} are more than the {max_tokens} tokens of output allowed",
            "min_tokens",
        )
    stop_ids = list(body.stop_token_ids or [])
    _check_ids(stop_ids, vocab_size, "stop_token_ids")
    if not body.ignore_eos:
        stop_ids += [eos for eos in eos_ids if eos not in stop_ids]
    return Sampling(
        max_tokens=max_tokens,
        temperature=chosen(body.temperature, defaults, "temperature", 1.0),
        top_k=max(0, int(chosen(body.top_k, defaults, "top_k", 0))),
        top_p=chosen(body.top_p, defaults, "top_p", 1.0),
        min_p=chosen(body.min_p, defaults, "min_p", 0.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK,
        stop_token_ids=stop_ids,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=chosen(body.repetition_penalty, defaults, "repetition_penalty", 1.0),
        logit_bias=_bias(body.logit_bias or {}, vocab_size),
        min_tokens=body.min_tokens or 0,
        logprobs=_logprobs(body),
        grammar=grammar,
        prompt_logprobs=prompt_logprobs(body),
        allowed_token_ids=_allowed(body.allowed_token_ids, vocab_size, grammar),
        bad_words=bad_words,
        logprob_token_ids=_named(body.logprob_token_ids, vocab_size),
    )


def chosen(
    asked: float | None, defaults: Mapping[str, float], name: str, otherwise: float
) -> float:
    """Return what a request asks for, else the checkpoint's default, else ``otherwise``."""
    return defaults.get(name, otherwise) if asked is None else asked


def _allowed(ids: list[int] | None, vocab_size: int, grammar: Grammar | None) -> list[int] | None:
    if ids is None:
        return None
    _check_ids(ids, vocab_size, "allowed_token_ids")
    if grammar is not None:  # together they may allow nothing at all
        field = grammar.field.partition(".")[0]
        raise invalid(f"allowed_token_ids and {field} exclude each other", "allowed_token_ids")
    return ids


def _named(ids: list[int] | None, vocab_size: int) -> list[int]:
    found = list(dict.fromkeys(ids or []))
    _check_ids(found, vocab_size, "logprob_token_ids")
    return found


def prompt_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    """Return how many of the likeliest tokens are wanted for each token of the prompt.

    None where nothing is wanted of it. An echo has the log probabilities of its tokens, too.
    """
    wanted = [body.prompt_logprobs]
    if isinstance(body, CompletionRequest) and body.echo:
        wanted.append(body.logprobs)
    return max((one for one in wanted if one is not None), default=None)


def told_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    """Return how many log probabilities each token comes with; None for none at all."""
    wanted = _logprobs(body)
    return len(body.logprob_token_ids) if body.logprob_token_ids else wanted


def _logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def _bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    wrong = [key for key in given if not (key.isascii() and key.isdigit())]
    if wrong:
        names = ", ".join(repr(key[:32]) for key in wrong[:8])
        raise invalid(f"logit_bias: not a token id: {names}", "logit_bias")
    bias = {int(key[:20]): value for key, value in given.items()}
    _check_ids(bias, vocab_size, "logit_bias")
    return bias


def _check_ids(ids: list[int] | dict[int, float], vocab_size: int, param: str) -> None:
    if ids and max(ids) >= vocab_size:
        raise invalid(
            f"{param}: token {max(ids)} does not exist; the largest is {vocab_size - 1}", param
        )
