"""Quantization config of a checkpoint: FP8 in the format of compressed-tensors.

Only the format that vLLM and LLM Compressor call FP8 dynamic is supported: e4m3 weights with a
scale for each output channel, and activations that are quantized token by token. Errors name any
other field, so that no checkpoint is computed wrongly.
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
"""Maximum repetitions in a pattern: each multiplies the matching time by the length of a name."""
SIMPLE = re.compile(r"[\w^$\-]|\.\*?|\\[.d]\+?")
r"""Allowed elements of a pattern: names, dots, ``.*`` and ``\\d+``."""

DEFAULTS: Mapping[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False,
    "group_size": None, "block_structure": None, "actorder": None,
}  # fmt: skip
"""Defaults of compressed-tensors for absent fields."""
WEIGHTS = {**DEFAULTS, "type": "float", "strategy": "channel"}
ACTIVATIONS = {**DEFAULTS, "type": "float", "strategy": "token", "dynamic": True}
WITHOUT_EFFECT = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields about calibration, and about dtypes that the tensors state themselves."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """FP8 quantization of all linear layers except those that match an entry of ``ignore``."""

    ignore: tuple[str, ...] = ()

    def covers(self, paths: Sequence[str]) -> bool:
        """Report whether the matrix that combines the layers at ``paths`` is quantized.

        Raises ValueError if only some of them are.
        """
        kept = [path for path in paths if self._is_ignored(path)]
        if kept and len(kept) < len(paths):
            other = next(path for path in paths if path not in kept)
            raise ValueError(
                f"field {FIELD}.ignore: matches {kept[0]} but not {other}, which are one matrix"
                " here; it must match both or neither"
            )
        return not kept

    def must_ignore(self, path: str, name: str) -> None:
        """Raise ValueError if the layer at ``path`` is quantized. ``name`` describes it."""
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
    """Return the quantization in the field ``quantization_config``; None if it is absent.

    ``tied`` means that the output head is the embedding, which is never quantized. Raises
    ValueError with a field that is not supported.
    """
    if value is None:
        return None
    config = _object(value, FIELD)
    _require(config, FIELD, "quant_method", METHOD)
    _require(config, FIELD, "format", FORMAT)
    _require(config, FIELD, "quantization_status", "compressed", default="compressed")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(name):
            raise ValueError(f"field {FIELD}.{name}: {_format(config[name])} is not supported")
    groups = _object(config.get("config_groups"), f"{FIELD}.config_groups")
    if len(groups) != 1:
        raise ValueError(f"field {FIELD}.config_groups: {len(groups)} groups, expected one")
    for name, group in groups.items():
        _check_group(_object(group, f"{FIELD}.config_groups.{name}"), name)
    known = {
        "quant_method", "format", "quantization_status", "kv_cache_scheme", "sparsity_config",
        "transform_config", "config_groups", "ignore", "version", "global_compression_ratio",
    }  # fmt: skip
    _reject_unknown(config, known, FIELD)
    found = Quantization(_ignore(config.get("ignore")))
    if not tied and found.covers([HEAD]):
        raise ValueError(
            f"field {FIELD}.ignore: must name {HEAD}; a quantized output head is not supported"
        )
    return found


WHOLE = (HEAD, r"re:.*\.mlp\.gate$")
"""Layers that are never quantized: the output head and routers."""


def config_of(ignore: Sequence[str] = WHOLE) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint that quantizes all but ``ignore``."""

    def arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "observer": None, "observer_kwargs": {}}

    group = {
        "targets": ["Linear"],
        "weights": arguments(WEIGHTS),
        "input_activations": arguments(ACTIVATIONS),
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
        arguments = _object(group.get(field), inner)
        for key, wanted in expected.items():
            _require(arguments, inner, key, wanted, default=DEFAULTS[key])
        _reject_unknown(arguments, {*expected, *WITHOUT_EFFECT}, inner)
    _reject_unknown(
        group, {"targets", "format", "output_activations", "weights", "input_activations"}, where
    )


def _ignore(value: Any) -> tuple[str, ...]:
    where = f"{FIELD}.ignore"
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"field {where}: {_format(value)} is not a list of names")
    if len(entries) > MAX_IGNORED:
        raise ValueError(f"field {where}: {len(entries)} entries, at most {MAX_IGNORED} allowed")
    for entry in entries:
        pattern = entry.removeprefix(PATTERN)
        if pattern != entry and (
            len(pattern) > MAX_PATTERN
            or pattern.count("*") + pattern.count("+") > MAX_STARS
            or SIMPLE.sub("", pattern)
        ):
            raise ValueError(
                rf"field {where}: pattern {_format(pattern)} is not supported: only names, dots, .*"
                rf" and \d+, at most {MAX_STARS} of these two, in {MAX_PATTERN} characters"
            )
    return tuple(entries)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"field {where}: {_format(value)} is not an object")
    return value


def _require(
    config: Mapping[str, Any], where: str, field: str, wanted: Any, default: Any = None
) -> None:
    """Raise ValueError unless ``field``, or ``default`` if it is null, is ``wanted``.

    True does not equal 1.
    """
    found = config.get(field)
    found = default if found is None else found
    if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        raise ValueError(
            f"field {where}.{field}: {_format(found)} is not supported, only {_format(wanted)}"
        )


def _reject_unknown(config: Mapping[str, Any], known: set[str], where: str) -> None:
    for field, value in config.items():
        if field not in known and value not in (None, {}, [], False):
            raise ValueError(f"field {where}.{field}: {_format(value)} is not supported")


def _format(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
