"""What ``--speculative-config`` asks for, in vLLM's words. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MOST_DRAFTS = 64
LONGEST_LOOKUP = 64
DEFAULT_LOOKUP = 5
"""vLLM's, where neither the longest nor the shortest is given."""

Lookup = Annotated[int, msgspec.Meta(ge=1, le=LONGEST_LOOKUP)]


class Speculative(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Each step verifies up to ``num_speculative_tokens`` drafts of a request.

    ``ngram`` takes them from the request's own text, by its last ``prompt_lookup_min`` to
    ``prompt_lookup_max`` tokens; ``draft_model`` from the smaller ``model``.
    """

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_DRAFTS)]
    prompt_lookup_max: Lookup | None = None
    prompt_lookup_min: Lookup | None = None
    model: str | None = None

    @property
    def lookup(self) -> tuple[int, int]:
        """The shortest and the longest run of tokens to look up; one is the other's default."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP
        return self.prompt_lookup_min or longest, longest


def parse(text: str) -> Speculative:
    """Return what the flag's JSON means; ValueError names the field that is wrong."""
    try:
        found = msgspec.json.decode(text, type=Speculative)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if found.method == "draft_model":
        if not found.model:
            raise ValueError("field model: missing; method draft_model needs a checkpoint")
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(found, name) is not None:
                raise ValueError(f"field {name}: a draft model has none; leave it out")
    elif found.model is not None:
        raise ValueError("field model: prompt lookup has none; leave it out")
    shortest, longest = found.lookup
    if shortest > longest:
        raise ValueError(
            f"field prompt_lookup_min: {shortest} is more than prompt_lookup_max {longest}"
        )
    return found
