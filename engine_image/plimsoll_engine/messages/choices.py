"""Send several choices of one prompt in one message, so that a long prompt is sent only once."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from plimsoll_engine.messages.worker_ipc import Choice, Submit

# The worker runs no step while it reads a message. This many tokens take about 20 ms:
# Request.create takes 3.5 ms for 100,000 tokens on one CPU core.
MAX_JOINED_TOKENS = 1 << 19


def create_choice(first_submit: Submit, other_submit: Submit) -> Choice | None:
    """Return ``other_submit`` as a choice of ``first_submit``; None if it cannot be one."""
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
    """Yield each request of a message."""
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
