"""Send several choices of one prompt in one message, so that a long prompt is sent only once."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from plimsoll_engine.messages.worker_ipc import Choice, Submit

MAX_JOINED_TOKENS = 1 << 19
"""Maximum number of tokens in a message with more than one request.

The worker runs no step while it reads a message. For 100,000 tokens, ``Request.create`` takes 3.5
ms on one CPU core, so this is about 20 ms.
"""


def create_choice(first: Submit, other: Submit) -> Choice | None:
    """Return ``other`` as a choice of the request ``first``.

    Return None if the requests differ in a field that all choices of a request share.
    """
    if other.prompt_ids is not first.prompt_ids or _clear_choice_fields(
        other
    ) != _clear_choice_fields(first):
        return None
    return Choice(
        other.request_id, other.sampling.seed, other.output_ids, other.arrived, other.attempt
    )


def split_choices(submit: Submit) -> Iterator[Submit]:
    """Yield each request of a message. All requests share the prompt and the media."""
    yield replace(submit, choices=[])
    for choice in submit.choices:
        yield replace(
            submit,
            request_id=choice.request_id,
            sampling=replace(submit.sampling, seed=choice.seed),
            output_ids=choice.output_ids,
            arrived=choice.arrived,
            attempt=choice.attempt,
            forget=[],
            choices=[],
        )


def _clear_choice_fields(submit: Submit) -> Submit:
    sampling = replace(submit.sampling, seed=0)
    return replace(
        submit, request_id="", prompt_ids=[], sampling=sampling, output_ids=[], arrived=0, attempt=0
    )
