"""Parser of ``--speculative-config``. The field names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MAX_DRAFT_TOKENS = 64
MAX_LOOKUP_TOKENS = 64
# vLLM's default if neither prompt_lookup_min nor prompt_lookup_max is set.
DEFAULT_LOOKUP_TOKENS = 5

LookupLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_LOOKUP_TOKENS)]


class Speculative(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Settings of speculative decoding.

    The method ``ngram`` searches the request's own tokens for its last tokens, and the method
    ``draft_model`` runs the smaller ``model``.
    """

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFT_TOKENS)]
    prompt_lookup_max: LookupLength | None = None
    prompt_lookup_min: LookupLength | None = None
    model: str | None = None

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """Minimum and maximum number of tokens to search for.

        If only one of the two fields is set, its value is used for both.
        """
        longest = self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP_TOKENS
        return self.prompt_lookup_min or longest, longest


def parse_speculative(text: str) -> Speculative:
    """Return the settings in a JSON object. Raises ValueError."""
    try:
        found = msgspec.json.decode(text, type=Speculative)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if found.method == "draft_model":
        if not found.model:
            raise ValueError(
                "'model' must be the folder of a checkpoint if 'method' is 'draft_model'"
            )
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(found, name) is not None:
                raise ValueError(f"field {name} applies only to method 'ngram': remove the field")
    elif found.model is not None:
        raise ValueError("field model applies only to method 'draft_model': remove the field")
    shortest, longest = found.ngram_lengths
    if shortest > longest:
        raise ValueError(
            f"field prompt_lookup_min must be at most prompt_lookup_max ({longest}), got {shortest}"
        )
    return found
