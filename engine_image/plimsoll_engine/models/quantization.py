"""Parse the quantization config of a checkpoint: FP8 in the format of compressed-tensors.

The only supported scheme is FP8 dynamic: e4m3 weights with a scale per output channel, and
activations quantized per token. Other values and unknown fields are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIG_FIELD = "quantization_config"
QUANT_METHOD, QUANT_FORMAT = "compressed-tensors", "float-quantized"
OUTPUT_HEAD = "lm_head"
PATTERN_PREFIX = "re:"
MAX_IGNORE_ENTRIES, MAX_PATTERN_CHARACTERS = 4096, 256
# Each repetition can multiply the time of a match by the length of the name.
MAX_PATTERN_REPETITIONS = 4
# Names, dots, .* and \d+.
ALLOWED_PATTERN_ELEMENT = re.compile(r"[\w^$\-]|\.\*?|\\[.d]\+?")

# As in compressed-tensors.
ARGUMENT_DEFAULTS: Mapping[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False,
    "group_size": None, "block_structure": None, "actorder": None,
}  # fmt: skip
WEIGHT_ARGUMENTS = {**ARGUMENT_DEFAULTS, "type": "float", "strategy": "channel"}
ACTIVATION_ARGUMENTS = {**ARGUMENT_DEFAULTS, "type": "float", "strategy": "token", "dynamic": True}
# Calibration settings, and dtypes of existing tensors.
FIELDS_WITHOUT_EFFECT = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True, slots=True)
class Quantization:
    """FP8 quantization of all linear layers that match no entry of ``ignore``.

    An entry is the path of a layer, or a pattern that begins with ``re:``.
    """

    ignore: tuple[str, ...] = ()

    def is_quantized(self, paths: Sequence[str]) -> bool:
        """Report whether the layers at ``paths``, which are fused into one matrix, are quantized.

        Raises ValueError if only some of them are quantized.
        """
        ignored = [path for path in paths if self._is_ignored(path)]
        if ignored and len(ignored) < len(paths):
            quantized = next(path for path in paths if path not in ignored)
            raise ValueError(
                f"field {CONFIG_FIELD}.ignore matches {ignored[0]} but not {quantized}, "
                "which the engine fuses into one matrix: it must match both or neither"
            )
        return not ignored

    def require_ignored(self, path: str, name: str) -> None:
        """Raise ValueError, with ``name`` for the layer, if the layer at ``path`` is quantized."""
        if not self._is_ignored(path):
            raise ValueError(
                f"field {CONFIG_FIELD}.ignore must match {path}, because FP8 weights of "
                f"{name} are not supported"
            )

    def _is_ignored(self, path: str) -> bool:
        return any(
            re.match(entry.removeprefix(PATTERN_PREFIX), path) is not None
            if entry.startswith(PATTERN_PREFIX)
            else entry == path
            for entry in self.ignore
        )


def parse_config(value: Any, is_head_tied: bool = False) -> Quantization | None:
    """Return the quantization in the config field ``quantization_config``; None if it is missing.

    If ``is_head_tied``, the output head is the embedding, which is never quantized. Raises
    ValueError, naming the field, if a field is not supported.
    """
    if value is None:
        return None
    config = _require_object(value, CONFIG_FIELD)
    _require_value(config, CONFIG_FIELD, "quant_method", QUANT_METHOD)
    _require_value(config, CONFIG_FIELD, "format", QUANT_FORMAT)
    _require_value(config, CONFIG_FIELD, "quantization_status", "compressed", default="compressed")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(name):
            raise ValueError(
                f"field {CONFIG_FIELD}.{name} has the unsupported value "
                f"{_format_value(config[name])}"
            )
    groups = _require_object(config.get("config_groups"), f"{CONFIG_FIELD}.config_groups")
    if len(groups) != 1:
        raise ValueError(
            f"field {CONFIG_FIELD}.config_groups must have exactly one group, got {len(groups)}"
        )
    for name, group in groups.items():
        _check_group(_require_object(group, f"{CONFIG_FIELD}.config_groups.{name}"), name)
    fields = {
        "quant_method", "format", "quantization_status", "kv_cache_scheme", "sparsity_config",
        "transform_config", "config_groups", "ignore", "version", "global_compression_ratio",
    }  # fmt: skip
    _reject_unknown_fields(config, fields, CONFIG_FIELD)
    quantization = Quantization(_parse_ignored_layers(config.get("ignore")))
    if not is_head_tied and quantization.is_quantized([OUTPUT_HEAD]):
        raise ValueError(
            f"field {CONFIG_FIELD}.ignore must include {OUTPUT_HEAD}, because a quantized "
            "output head is not supported"
        )
    return quantization


# The output head and the routers.
NEVER_QUANTIZED = (OUTPUT_HEAD, r"re:.*\.mlp\.gate$")


def make_config() -> dict[str, Any]:
    """Return the ``quantization_config`` that quantizes all but :data:`NEVER_QUANTIZED`."""

    def make_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "observer": None, "observer_kwargs": {}}

    group = {
        "targets": ["Linear"],
        "weights": make_arguments(WEIGHT_ARGUMENTS),
        "input_activations": make_arguments(ACTIVATION_ARGUMENTS),
        "output_activations": None,
    }
    return {
        "quant_method": QUANT_METHOD,
        "format": QUANT_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(NEVER_QUANTIZED),
        "kv_cache_scheme": None,
    }


def _check_group(group: Mapping[str, Any], name: str) -> None:
    config_path = f"{CONFIG_FIELD}.config_groups.{name}"
    _require_value(group, config_path, "targets", ["Linear"])
    _require_value(group, config_path, "format", QUANT_FORMAT, default=QUANT_FORMAT)
    _require_value(group, config_path, "output_activations", None)
    for field, expected in (
        ("weights", WEIGHT_ARGUMENTS),
        ("input_activations", ACTIVATION_ARGUMENTS),
    ):
        inner = f"{config_path}.{field}"
        arguments = _require_object(group.get(field), inner)
        for key, value in expected.items():
            _require_value(arguments, inner, key, value, default=ARGUMENT_DEFAULTS[key])
        _reject_unknown_fields(arguments, {*expected, *FIELDS_WITHOUT_EFFECT}, inner)
    _reject_unknown_fields(
        group,
        {"targets", "format", "output_activations", "weights", "input_activations"},
        config_path,
    )


def _parse_ignored_layers(value: Any) -> tuple[str, ...]:
    config_path = f"{CONFIG_FIELD}.ignore"
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"field {config_path} must be a list of names, got {_format_value(value)}")
    if len(entries) > MAX_IGNORE_ENTRIES:
        raise ValueError(
            f"field {config_path} must have at most {MAX_IGNORE_ENTRIES} entries, got "
            f"{len(entries)}"
        )
    for entry in entries:
        pattern = entry.removeprefix(PATTERN_PREFIX)
        if pattern != entry and (
            len(pattern) > MAX_PATTERN_CHARACTERS
            or pattern.count("*") + pattern.count("+") > MAX_PATTERN_REPETITIONS
            or ALLOWED_PATTERN_ELEMENT.sub("", pattern)
        ):
            raise ValueError(
                f"field {config_path} has the unsupported pattern {_format_value(pattern)}: "
                f"use names, dots, .* and \\d+, with at most {MAX_PATTERN_REPETITIONS} "
                f"repetitions and {MAX_PATTERN_CHARACTERS} characters"
            )
    return tuple(entries)


def _require_object(value: Any, config_path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"field {config_path} must be an object, got {_format_value(value)}")
    return value


def _require_value(
    config: Mapping[str, Any], config_path: str, field: str, expected: Any, default: Any = None
) -> None:
    # A missing or null field has the value ``default``. A boolean never equals a number.
    value = config.get(field)
    value = default if value is None else value
    if value != expected or isinstance(value, bool) != isinstance(expected, bool):
        raise ValueError(
            f"field {config_path}.{field} must be {_format_value(expected)}, got "
            f"{_format_value(value)}"
        )


def _reject_unknown_fields(
    config: Mapping[str, Any], known_fields: set[str], config_path: str
) -> None:
    for field, value in config.items():
        if field not in known_fields and value not in (None, {}, [], False):
            raise ValueError(
                f"field {config_path}.{field} is not supported, but has the value "
                f"{_format_value(value)}"
            )


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
