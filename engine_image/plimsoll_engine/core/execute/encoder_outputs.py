"""Storage of encoder outputs on the device, by the key of the image or audio clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.messages.worker_ipc import Media
from plimsoll_engine.models.model import MediaModel


class EncoderOutputs:
    """Encoder outputs [tokens, ...] by media key, on the model's device."""

    def __init__(self, model: MediaModel) -> None:
        self._model: MediaModel | None = model
        self._tensors: dict[bytes, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Device memory of all outputs, in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def bytes_per_token(self) -> int:
        """Size of one output token in bytes; 0 after :meth:`close`."""
        return 0 if self._model is None else self._model.output_bytes

    def find_problems(self, known_keys: set[bytes]) -> list[str]:
        """Return an audit message if there are outputs whose keys are not in ``known_keys``."""
        lost = self._tensors.keys() - known_keys
        return (
            [f"{len(lost)} encoder outputs are in the runner but not in the encoder cache"]
            if lost
            else []
        )

    def count_unknown_tokens(self, known_keys: set[bytes]) -> int:
        """Return the number of tokens in outputs whose keys are not in ``known_keys``."""
        return sum(
            tensor.shape[0] for key, tensor in self._tensors.items() if key not in known_keys
        )

    def free(self, keys: Sequence[bytes]) -> None:
        """Free the outputs with these ``keys``, if they exist."""
        for key in keys:
            self._tensors.pop(key, None)

    def encode_and_embed(
        self, chunks: Sequence[Chunk], ids: torch.Tensor, step: StepPlan
    ) -> torch.Tensor | None:
        """Encode the media of ``chunks``. Return the step's input embeddings [tokens, hidden].

        Return None if the embeddings of ``ids`` int64 [tokens] need no change. In an
        encoder-decoder model, the outputs are stored in ``step`` for cross attention.
        """
        assert self._model is not None
        self._encode([media for chunk in chunks for media in chunk.encode])
        if self._model.is_encoder_decoder:
            step.attended = [
                (chunk.rows, self._tensors[chunk.request.media[0].key]) for chunk in chunks
            ]
            return None
        return self._compute_embeddings(self._model, chunks, ids)

    def _encode(self, media: Sequence[Media]) -> None:
        if not media:
            return
        assert self._model is not None
        outputs = self._model.encode(media)
        for item, output in zip(media, outputs, strict=True):
            self._tensors[item.key] = output

    def _compute_embeddings(
        self, model: MediaModel, chunks: Sequence[Chunk], ids: torch.Tensor
    ) -> torch.Tensor | None:
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
        """Free all outputs. Idempotent."""
        self._tensors = {}
        self._model = None
