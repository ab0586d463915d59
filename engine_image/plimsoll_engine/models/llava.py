"""LLaVA with the vision tower and projector of transformers, and the decoder of this engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.messages.worker_ipc import Media
from plimsoll_engine.models import media_input
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.module_parts import (
    bind_module,
    clear_tensors,
    init_buffers,
    make_module_parts,
)

TOWER_PREFIX, PROJECTOR_PREFIX = "vision_tower.", "multi_modal_projector."
TEXT_PREFIX = "text."


class LlavaModel:
    """Vision-language model: a vision tower, a projector and a decoder.

    The projector's output replaces the embeddings of an image's placeholder tokens. All tensors are
    on the meta device until :meth:`bind` is called.
    """

    is_encoder_decoder = False

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._text = Decoder(config.text_config, dtype)
        self.kv = self._text.kv
        with torch.device("meta"):
            self._tower: Any = AutoModel.from_config(config.vision_config, dtype=dtype)
            self._projector: Any = LlavaMultiModalProjector(config).to(dtype)
        self._tower.eval()
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        self._skip_class = config.vision_feature_select_strategy == "default"
        side = config.vision_config.image_size
        self._shape = [config.vision_config.num_channels, side, side]
        self._tokens = (side // config.vision_config.patch_size) ** 2 + (not self._skip_class)
        self.output_bytes = config.text_config.hidden_size * dtype.itemsize
        self.parts = {TEXT_PREFIX + name: part for name, part in self._text.parts.items()}
        self.parts |= make_module_parts(self._tower, TOWER_PREFIX)
        self.parts |= make_module_parts(self._projector, PROJECTOR_PREFIX)

    @property
    def ignored_tensors(self) -> frozenset[str]:
        return self._text.ignored_tensors

    @staticmethod
    def normalize_name(name: str) -> str:
        """Map a checkpoint tensor's name, in the form of any version, to its name in ``parts``."""
        name = name.removeprefix("model.") if name.startswith(_NESTED_PREFIXES) else name
        name = name.replace("vision_tower.vision_model.", TOWER_PREFIX)
        if name.startswith("language_model."):
            name = name.removeprefix("language_model.")
            return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
        return name

    @property
    def device(self) -> torch.device:
        return self._text.device

    @property
    def dtype(self) -> torch.dtype:
        return self._text.dtype

    def get_parameters(self) -> dict[str, torch.Tensor]:
        tensors = {
            TEXT_PREFIX + name: tensor for name, tensor in self._text.get_parameters().items()
        }
        for prefix, module in ((TOWER_PREFIX, self._tower), (PROJECTOR_PREFIX, self._projector)):
            tensors |= {prefix + name: tensor.data for name, tensor in module.named_parameters()}
        return tensors

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, part in self.parts.items():
            if name not in tensors or tuple(tensors[name].shape) != part.shape:
                raise ValueError(f"tensor {name} is missing, or its shape is not {part.shape}")
        text = {
            k.removeprefix(TEXT_PREFIX): t for k, t in tensors.items() if k.startswith(TEXT_PREFIX)
        }
        self._text.bind(text)
        bind_module(self._tower, tensors, TOWER_PREFIX)
        bind_module(self._projector, tensors, PROJECTOR_PREFIX)
        init_buffers(self._tower, self.device)

    def encode(self, media: Sequence[Media]) -> list[torch.Tensor]:
        """Return the embeddings [image tokens, hidden] of each image, in the model's dtype.

        ``media`` contain float32 pixels [channels, height, width].
        """
        pixels = media_input.stack_media(media, self._shape, self.dtype, self.device)
        states = self._tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        chosen = [states[layer] for layer in self._layers]
        if self._skip_class:
            chosen = [state[:, 1:] for state in chosen]
        # Copy each output, because a view would keep the memory of the whole batch.
        return [rows.clone() for rows in self._projector(torch.cat(chosen, dim=-1))]

    def make_dummy_media(self) -> Media:
        return media_input.make_dummy_media("image", self._shape, self._tokens, self._tokens)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._text.embed(ids)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._text.forward(ids, positions, plan, embeds)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._text.compute_logits(hidden)

    def close(self) -> None:
        self._text.close()
        clear_tensors(self._tower)
        clear_tensors(self._projector)


_NESTED_PREFIXES = ("model.language_model.", "model.vision_tower.", "model.multi_modal_projector.")
