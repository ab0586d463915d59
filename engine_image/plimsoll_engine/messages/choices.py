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


def create_choice(first_submit: Submit, other_submit: Submit) -> Choice | None:
    """Return ``other_submit`` as a choice of the request ``first_submit``.

    Return None if the requests differ in a field that all choices of a request share.
    """
    if other_submit.prompt_ids is not first_submit.prompt_ids or _clear_choice_fields(
        other_submit
    ) != _clear_choice_fields(first_submit):
        return None
    return Choice(
        other_submit.request_id,
        other_submit.sampling.seed,
        other_submit.output_ids,
        other_submit.arrived,
        other_submit.attempt,
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
