"""Convert a checkpoint in bfloat16, float16 or float32 to one with FP8 weights.

    python -m plimsoll_faults.models.write_fp8 CHECKPOINT OUT

The matrices of all layers, including experts, are in e4m3 with a scale for each output channel.
One file of the checkpoint is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from plimsoll_engine.errors import LoadError
from plimsoll_engine.kernels.quantized import quantize
from plimsoll_engine.models import decoder, loader, quantization
from plimsoll_engine.models.decoder_parts import DecoderSpec, make_parts
from plimsoll_engine.models.safetensors_files import INDEX_FILE, list_weight_files, open_safetensors

WEIGHT_SUFFIX = ".weight"
SCALE_SUFFIX = ".weight_scale"


def write_fp8(source: Path, target: Path) -> None:
    """Write ``source`` into the new folder ``target`` with FP8 weights.

    Raises LoadError if ``source`` cannot be quantized, and FileExistsError.
    """
    config = loader.load_config(source)
    if not decoder.supports(config) or loader.read_quantization(config) is not None:
        raise LoadError(
            f"{source}: cannot be quantized: only unquantized text models of "
            f"{', '.join(decoder.SUPPORTED_MODEL_TYPES)} are supported"
        )
    exclusions = quantization.Quantization(quantization.NEVER_QUANTIZED)
    matrices = {
        path
        for name, part in make_parts(DecoderSpec.from_config(config)).items()
        if name.startswith("layers.") and len(part.shape) == 2
        for path, _ in part.sources
        if exclusions.is_quantized([path.removesuffix(WEIGHT_SUFFIX)])
    }
    target.mkdir(parents=True)
    files = list_weight_files(source)
    weight_map: dict[str, str] = {}
    size = 0
    for file in files:
        tensors = _quantize_file(file, matrices)
        size += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file.name)
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    if (source / INDEX_FILE).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    raw: dict[str, Any] = json.loads((source / "config.json").read_bytes())
    raw[quantization.CONFIG_FIELD] = quantization.make_config()
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def _quantize_file(file: Path, matrices: set[str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with open_safetensors(file) as source_file:
        for name in source_file.keys():  # noqa: SIM118 - not a dictionary
            tensor = source_file.get_tensor(name)
            if name in matrices:
                tensor, scales = quantize(tensor)
                tensors[name.removesuffix(WEIGHT_SUFFIX) + SCALE_SUFFIX] = scales
            tensors[name] = tensor
    return tensors


def main() -> None:
    """Convert the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="CHECKPOINT")
    parser.add_argument("target", type=Path, metavar="OUT", help="new folder for the result")
    flags = parser.parse_args()
    try:
        write_fp8(flags.source, flags.target)
    except (LoadError, OSError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
