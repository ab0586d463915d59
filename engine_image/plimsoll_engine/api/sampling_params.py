"""Convert request fields to sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType

from plimsoll_engine.api.errors import make_invalid_error
from plimsoll_engine.api.protocol import ChatRequest, CompletionRequest
from plimsoll_engine.messages.worker_ipc import Grammar, Sampling

SEED_MASK = (1 << 63) - 1


def create_sampling_params(
    body: CompletionRequest | ChatRequest,
    max_tokens: int,
    eos_ids: list[int],
    vocab_size: int,
    grammar: Grammar | None,
    bad_words: list[list[int]],
    defaults: Mapping[str, float] = MappingProxyType({}),
) -> Sampling:
    """Return the sampling parameters of ``body``. Raises ApiError.

    A missing field has the checkpoint's value in ``defaults``, or else OpenAI's: all tokens at
    temperature 1.
    """
    if (body.min_tokens or 0) > max_tokens:
        raise make_invalid_error(
            f"min_tokens is {body.min_tokens}, which exceeds the limit of {max_tokens} "
            "output tokens: lower min_tokens or raise max_tokens",
            "min_tokens",
        )
    stop_ids = list(body.stop_token_ids or [])
    _check_token_ids(stop_ids, vocab_size, "stop_token_ids")
    if not body.ignore_eos:
        stop_ids += [eos for eos in eos_ids if eos not in stop_ids]
    return Sampling(
        max_tokens=max_tokens,
        temperature=get_value_or_default(body.temperature, defaults, "temperature", 1.0),
        top_k=max(0, int(get_value_or_default(body.top_k, defaults, "top_k", 0))),
        top_p=get_value_or_default(body.top_p, defaults, "top_p", 1.0),
        min_p=get_value_or_default(body.min_p, defaults, "min_p", 0.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK,
        stop_token_ids=stop_ids,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=get_value_or_default(
            body.repetition_penalty, defaults, "repetition_penalty", 1.0
        ),
        logit_bias=_check_logit_bias(body.logit_bias or {}, vocab_size),
        min_tokens=body.min_tokens or 0,
        logprobs=_get_top_logprobs(body),
        grammar=grammar,
        prompt_logprobs=get_num_prompt_logprobs(body),
        allowed_token_ids=_check_allowed_tokens(body.allowed_token_ids, vocab_size, grammar),
        bad_words=bad_words,
        logprob_token_ids=_check_logprob_tokens(body.logprob_token_ids, vocab_size),
    )


def get_value_or_default(
    requested: float | None, defaults: Mapping[str, float], name: str, fallback: float
) -> float:
    """Return ``requested``, else the checkpoint's default of field ``name``, else ``fallback``."""
    return defaults.get(name, fallback) if requested is None else requested


def _check_allowed_tokens(
    token_ids: list[int] | None, vocab_size: int, grammar: Grammar | None
) -> list[int] | None:
    if token_ids is None:
        return None
    _check_token_ids(token_ids, vocab_size, "allowed_token_ids")
    if grammar is not None:  # the mask and the grammar together may allow no token
        field = grammar.field.partition(".")[0]
        raise make_invalid_error(
            f"allowed_token_ids and {field} cannot be combined: omit one", "allowed_token_ids"
        )
    return token_ids


def _check_logprob_tokens(token_ids: list[int] | None, vocab_size: int) -> list[int]:
    found = list(dict.fromkeys(token_ids or []))
    _check_token_ids(found, vocab_size, "logprob_token_ids")
    return found


def get_num_prompt_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    """Return the number of likeliest tokens per prompt token; None without log probabilities.

    An echo with ``logprobs`` also needs these log probabilities.
    """
    wanted = [body.prompt_logprobs]
    if isinstance(body, CompletionRequest) and body.echo:
        wanted.append(body.logprobs)
    return max((one for one in wanted if one is not None), default=None)


def get_num_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    """Return the number of log probabilities per output token; None without log probabilities."""
    wanted = _get_top_logprobs(body)
    return len(body.logprob_token_ids) if body.logprob_token_ids else wanted


def _get_top_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def _check_logit_bias(logit_bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    wrong = [key for key in logit_bias if not (key.isascii() and key.isdigit() and len(key) <= 20)]
    if wrong:
        names = ", ".join(repr(key[:32]) for key in wrong[:8])
        raise make_invalid_error(
            f"the keys of logit_bias must be token IDs, got {names}", "logit_bias"
        )
    bias = {int(key): value for key, value in logit_bias.items()}
    _check_token_ids(bias, vocab_size, "logit_bias")
    return bias


def _check_token_ids(token_ids: list[int] | dict[int, float], vocab_size: int, param: str) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise make_invalid_error(
            f"token ID {max(token_ids)} is not in the vocabulary: the maximum is {vocab_size - 1}",
            param,
        )
