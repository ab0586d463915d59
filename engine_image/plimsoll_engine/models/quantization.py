"""Quantization config of a checkpoint: FP8 in the format of compressed-tensors.

Only the scheme that vLLM and LLM Compressor call FP8 dynamic is supported: e4m3 weights with one
scale per output channel, and activations quantized per token. Other values and unknown fields are
errors, so that no checkpoint gives wrong results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELD = "quantization_config"
METHOD, FORMAT = "compressed-tensors", "float-quantized"
HEAD = "lm_head"
PATTERN = "re:"
MAX_IGNORED, MAX_PATTERN = 4096, 256
MAX_STARS = 4
"""Maximum number of repetitions in a pattern.

Each one can multiply the matching time by the length of the name.
"""
SIMPLE = re.compile(r"[\w^$\-]|\.\*?|\\[.d]\+?")
r"""Allowed elements of a pattern: names, dots, ``.*`` and ``\d+``."""

DEFAULTS: Mapping[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False,
    "group_size": None, "block_structure": None, "actorder": None,
}  # fmt: skip
"""Values that compressed-tensors uses for missing fields."""
WEIGHTS = {**DEFAULTS, "type": "float", "strategy": "channel"}
ACTIVATIONS = {**DEFAULTS, "type": "float", "strategy": "token", "dynamic": True}
WITHOUT_EFFECT = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields that do not affect the result: calibration settings, and dtypes known from the tensors."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """FP8 quantization of all linear layers, except those that match an entry of ``ignore``."""

    ignore: tuple[str, ...] = ()

    def is_quantized(self, paths: Sequence[str]) -> bool:
        """Report whether the matrix that fuses the layers at ``paths`` is quantized.

        Raises ValueError if only some of these layers are quantized.
        """
        ignored = [path for path in paths if self._is_ignored(path)]
        if ignored and len(ignored) < len(paths):
            quantized = next(path for path in paths if path not in ignored)
            raise ValueError(
                f"field {FIELD}.ignore: matches {ignored[0]} but not {quantized}, which the engine "
                "fuses into one matrix; it must match both or neither"
            )
        return not ignored

    def require_ignored(self, path: str, name: str) -> None:
        """Raise ValueError if the layer at ``path`` is quantized.

        ``name`` describes the layer in the error message.
        """
        if not self._is_ignored(path):
            raise ValueError(
                f"field {FIELD}.ignore: must match {path}; FP8 weights of {name} are not supported"
            )

    def _is_ignored(self, path: str) -> bool:
        return any(
            re.match(entry.removeprefix(PATTERN), path) is not None
            if entry.startswith(PATTERN)
            else entry == path
            for entry in self.ignore
        )


def read(value: Any, tied: bool = False) -> Quantization | None:
    """Return the quantization from the field ``quantization_config``, or None if it is missing.

    ``tied`` means that the output head is the embedding, which is never quantized. Raises
    ValueError that names an unsupported field.
    """
    if value is None:
        return None
    config = _require_object(value, FIELD)
    _require(config, FIELD, "quant_method", METHOD)
    _require(config, FIELD, "format", FORMAT)
    _require(config, FIELD, "quantization_status", "compressed", default="compressed")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(name):
            raise ValueError(f"field {FIELD}.{name}: {_format(config[name])} is not supported")
    groups = _require_object(config.get("config_groups"), f"{FIELD}.config_groups")
    if len(groups) != 1:
        raise ValueError(f"field {FIELD}.config_groups: expected one group, not {len(groups)}")
    for name, group in groups.items():
        _check_group(_require_object(group, f"{FIELD}.config_groups.{name}"), name)
    fields = {
        "quant_method", "format", "quantization_status", "kv_cache_scheme", "sparsity_config",
        "transform_config", "config_groups", "ignore", "version", "global_compression_ratio",
    }  # fmt: skip
    _reject_unknown(config, fields, FIELD)
    quantization = Quantization(_read_ignore(config.get("ignore")))
    if not tied and quantization.is_quantized([HEAD]):
        raise ValueError(
            f"field {FIELD}.ignore: must include {HEAD}; a quantized output head is not supported"
        )
    return quantization


WHOLE = (HEAD, r"re:.*\.mlp\.gate$")
"""Layers that are never quantized: the output head and the routers."""


def make_config(ignore: Sequence[str] = WHOLE) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint that quantizes all but ``ignore``."""

    def make_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "observer": None, "observer_kwargs": {}}

    group = {
        "targets": ["Linear"],
        "weights": make_arguments(WEIGHTS),
        "input_activations": make_arguments(ACTIVATIONS),
        "output_activations": None,
    }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _check_group(group: Mapping[str, Any], name: str) -> None:
    where = f"{FIELD}.config_groups.{name}"
    _require(group, where, "targets", ["Linear"])
    _require(group, where, "format", FORMAT, default=FORMAT)
    _require(group, where, "output_activations", None)
    for field, expected in (("weights", WEIGHTS), ("input_activations", ACTIVATIONS)):
        inner = f"{where}.{field}"
        arguments = _require_object(group.get(field), inner)
        for key, value in expected.items():
            _require(arguments, inner, key, value, default=DEFAULTS[key])
        _reject_unknown(arguments, {*expected, *WITHOUT_EFFECT}, inner)
    _reject_unknown(
        group, {"targets", "format", "output_activations", "weights", "input_activations"}, where
    )


def _read_ignore(value: Any) -> tuple[str, ...]:
    where = f"{FIELD}.ignore"
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"field {where}: must be a list of names, not {_format(value)}")
    if len(entries) > MAX_IGNORED:
        raise ValueError(
            f"field {where}: {len(entries)} entries exceed the maximum of {MAX_IGNORED}"
        )
    for entry in entries:
        pattern = entry.removeprefix(PATTERN)
        if pattern != entry and (
            len(pattern) > MAX_PATTERN
            or pattern.count("*") + pattern.count("+") > MAX_STARS
            or SIMPLE.sub("", pattern)
        ):
            raise ValueError(
                f"field {where}: pattern {_format(pattern)} is not supported; use names, dots, "
                f".* and \\d+, with at most {MAX_STARS} repetitions and {MAX_PATTERN} characters"
            )
    return tuple(entries)


def _require_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"field {where}: must be an object, not {_format(value)}")
    return value


def _require(
    config: Mapping[str, Any], where: str, field: str, expected: Any, default: Any = None
) -> None:
    """Raise ValueError unless ``field`` equals ``expected``. Null means ``default``.

    A boolean never equals a number.
    """
    value = config.get(field)
    value = default if value is None else value
    if value != expected or isinstance(value, bool) != isinstance(expected, bool):
        raise ValueError(
            f"field {where}.{field}: {_format(value)} is not supported, only {_format(expected)}"
        )


def _reject_unknown(config: Mapping[str, Any], known: set[str], where: str) -> None:
    for field, value in config.items():
        if field not in known and value not in (None, {}, [], False):
            raise ValueError(f"field {where}.{field}: {_format(value)} is not supported")


def _format(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
