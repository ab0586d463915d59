"""The runner's side of the encoder cache: the outputs themselves, by key.

It decides nothing: it frees and encodes what the scheduler's ledger says, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.messages.worker_ipc import Media
from plimsoll_engine.models.model import MediaModel


class EncoderOutputs:
    """Outputs [tokens, ...] on the model's device."""

    def __init__(self, model: MediaModel) -> None:
        self._model: MediaModel | None = model
        self._tensors: dict[bytes, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, on the model's device."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def keys(self) -> set[bytes]:
        """Return the keys of the media whose output is held, for the audit."""
        return set(self._tensors)

    def tokens_beyond(self, known: set[bytes]) -> int:
        """Tokens of the outputs whose keys are not in ``known``."""
        return sum(tensor.shape[0] for key, tensor in self._tensors.items() if key not in known)

    def free(self, keys: Sequence[bytes]) -> None:
        """Let go of outputs; one that was never made is none to let go of."""
        for key in keys:
            self._tensors.pop(key, None)

    def prepare(
        self, chunks: Sequence[Chunk], ids: torch.Tensor, step: StepPlan
    ) -> torch.Tensor | None:
        """Encode what ``chunks`` ask for and hand the outputs to the step.

        They are in its plan, or in the input embeddings [tokens, hidden] of ``ids`` [tokens], which
        are returned in the model's dtype; None where no row is a placeholder.
        """
        assert self._model is not None
        self._encode([media for chunk in chunks for media in chunk.encode])
        if self._model.lifelong:
            step.attended = [
                (chunk.rows, self._tensors[chunk.request.media[0].key]) for chunk in chunks
            ]
            return None
        return self._embeds(self._model, chunks, ids)

    def _encode(self, media: Sequence[Media]) -> None:
        if not media:
            return
        assert self._model is not None
        outputs = self._model.encode(media)
        for item, output in zip(media, outputs, strict=True):
            self._tensors[item.key] = output

    def _embeds(
        self, model: MediaModel, chunks: Sequence[Chunk], ids: torch.Tensor
    ) -> torch.Tensor | None:
        """[tokens, hidden] with outputs in the place of placeholders; None where no row is one."""
        found: torch.Tensor | None = None
        row = 0
        for chunk in chunks:
            start = chunk.request.computed
            for media in chunk.request.media:
                first = max(media.start, start)
                last = min(media.start + media.length, start + chunk.count)
                if first >= last:
                    continue
                if found is None:
                    found = model.embed(ids)
                output = self._tensors[media.key][first - media.start : last - media.start]
                found[row + first - start : row + last - start] = output
            row += chunk.rows
        return found

    def close(self) -> None:
        """Let go of everything. Again does nothing more."""
        self._tensors = {}
        self._model = None
