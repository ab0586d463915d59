"""Use a module of transformers as a part of a model of this engine."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll_engine.models.decoder_parts import Part


def make_module_parts(module: torch.nn.Module, prefix: str) -> dict[str, Part]:
    """Return a part for each parameter, by checkpoint name: ``prefix`` and the parameter's path."""
    return {
        prefix + name: Part(((prefix + name, parameter.shape[0]),), tuple(parameter.shape))
        for name, parameter in module.named_parameters()
    }


def bind_module(module: torch.nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    """Use the ``tensors`` whose names begin with ``prefix`` as the parameters of ``module``."""
    for name, _ in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        parameter = torch.nn.Parameter(tensors[prefix + name], requires_grad=False)
        module.get_submodule(owner)._parameters[last] = parameter


def init_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """Create the position IDs of vision towers, which checkpoints do not contain.

    Raises ValueError if ``module`` has any other buffer.
    """
    for name, buffer in list(module.named_buffers()):
        if not name.endswith("position_ids"):
            raise ValueError(f"the encoder has a buffer {name}, which is not supported")
        owner, _, last = name.rpartition(".")
        numbers = torch.arange(buffer.shape[-1], device=device).expand(buffer.shape)
        module.get_submodule(owner)._buffers[last] = numbers


def clear_tensors(module: Any) -> None:
    """Remove all tensors from ``module``, so that references to it do not keep them in memory."""
    for part in module.modules():
        part._parameters.clear()
        part._buffers.clear()
