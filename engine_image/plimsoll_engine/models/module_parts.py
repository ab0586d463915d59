"""A transformers module as a part of one of our models: its tensors by name, bound from outside."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll_engine.models.decoder_parts import Part


def module_parts(module: torch.nn.Module, prefix: str) -> dict[str, Part]:
    """Each parameter under ``prefix`` + its name, which is also its name in a checkpoint."""
    return {
        prefix + name: Part(((prefix + name, parameter.shape[0]),), tuple(parameter.shape))
        for name, parameter in module.named_parameters()
    }


def bind_module(module: torch.nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    """Make ``module`` compute with those of ``tensors`` that are named after it."""
    for name, _ in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        parameter = torch.nn.Parameter(tensors[prefix + name], requires_grad=False)
        module.get_submodule(owner)._parameters[last] = parameter


def settle_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """Make the buffers that no checkpoint holds: the position numbers of vision towers.

    ValueError names one that is of another kind.
    """
    for name, buffer in list(module.named_buffers()):
        if not name.endswith("position_ids"):
            raise ValueError(f"buffer {name} of the encoder: how to make it is not known")
        owner, _, last = name.rpartition(".")
        numbers = torch.arange(buffer.shape[-1], device=device).expand(buffer.shape)
        module.get_submodule(owner)._buffers[last] = numbers


def empty(module: Any) -> None:
    """Take every tensor out of ``module``, so that no reference to it keeps weights alive."""
    for part in module.modules():
        part._parameters.clear()
        part._buffers.clear()
