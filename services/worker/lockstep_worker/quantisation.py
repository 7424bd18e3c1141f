"""Which quantised checkpoints are read: e4m3 weights with scales by block (DeepSeek-V3's form) or by row (compressed-tensors)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from lockstep_worker.weights import ConfigFile

FIELD, OLD_FIELD = "quantization_config", "compression_config"
FLOATS = "float-quantized"
# What is read, and what says which layers are meant or who made it: the tensors themselves tell which are of 8 bits.
FP8_FIELDS = frozenset(
    (
        "quant_method",
        "fmt",
        "activation_scheme",
        "weight_block_size",
        "scale_fmt",
        "modules_to_not_convert",
        "ignored_layers",
    )
)
COMPRESSED_FIELDS = frozenset(
    (
        "quant_method", "format", "config_groups", "kv_cache_scheme", "ignore", "quantization_status", "version",
        "global_compression_ratio",
    )
)  # fmt: skip
GROUP_FIELDS = frozenset(("targets", "weights", "input_activations", "format"))
# An observer is how scales were found.
SCHEME_FIELDS = frozenset(("num_bits", "type", "symmetric", "strategy", "dynamic", "observer", "observer_kwargs"))


class Scales(enum.Enum):
    """What the scale tensors of a checkpoint's e4m3 weights are, by the ending of their names."""

    BLOCKS = "weight_scale_inv"  # one for each 128 x 128 elements
    ROWS = "weight_scale"  # one for each output channel


def read_quantisation(config: ConfigFile) -> Scales | None:
    """None if the checkpoint is not quantised. Raises ConfigError naming the field that asks for what is not supported, or that is
    not known: what a checkpoint asks for and does not get would change its answers."""
    if not _is_nothing(config.get(OLD_FIELD)):
        raise config.error(OLD_FIELD, f"is the name of an older form; {FIELD} is the one that is read")
    found = config.get(FIELD)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise config.error(FIELD, f"is {found!r}, expected an object")
    method = found.get("quant_method")
    if method == "fp8":
        _expect(config, FIELD, found, "fmt", None, "e4m3")
        _expect(config, FIELD, found, "activation_scheme", None, "dynamic")
        _expect(config, FIELD, found, "weight_block_size", [128, 128])
        # ue8m0: scales are powers of two. Those of weights are read as they are stored; those of activations, which are computed
        # here, are then finer than the checkpoint's author had them.
        _expect(config, FIELD, found, "scale_fmt", None, "ue8m0")
        _expect_nothing_else(config, FIELD, found, FP8_FIELDS)
        return Scales.BLOCKS
    if method == "compressed-tensors":
        _read_compressed(config, found)
        return Scales.ROWS
    raise config.error(f"{FIELD}.quant_method", f"is {method!r}, which is not one of fp8, compressed-tensors")


def _read_compressed(config: ConfigFile, found: Mapping[str, Any]) -> None:
    """Every group of layers must have e4m3 weights with a scale a channel, and operands that are quantised token by token."""
    _expect(config, FIELD, found, "format", FLOATS)
    _expect(config, FIELD, found, "quantization_status", None, "compressed", "frozen")
    _expect_nothing_else(config, FIELD, found, COMPRESSED_FIELDS)
    _read_kv_scheme(config, found.get("kv_cache_scheme"))
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config.error(f"{FIELD}.config_groups", f"is {groups!r}, expected groups of layers")
    for name, group in groups.items():
        field = f"{FIELD}.config_groups.{name}"
        if not isinstance(group, dict):
            raise config.error(field, f"is {group!r}, expected an object")
        _expect(config, field, group, "format", None, FLOATS)
        _expect_nothing_else(config, field, group, GROUP_FIELDS)
        _read_scheme(config, f"{field}.weights", group.get("weights"), "channel", None, False)
        _read_scheme(config, f"{field}.input_activations", group.get("input_activations"), "token", True)


def _read_scheme(config: ConfigFile, field: str, scheme: object, strategy: str, *dynamic: bool | None) -> None:
    if not isinstance(scheme, dict):
        raise config.error(field, f"is {scheme!r}, expected an object")
    _expect_float8(config, field, scheme)
    _expect(config, field, scheme, "strategy", strategy)
    _expect(config, field, scheme, "dynamic", *dynamic)
    _expect_nothing_else(config, field, scheme, SCHEME_FIELDS)


def _read_kv_scheme(config: ConfigFile, scheme: object) -> None:
    """Scales for a KV cache of 8 bits do no harm to one of 16; such a scheme may be there, any other may not."""
    if scheme is None:
        return
    field = f"{FIELD}.kv_cache_scheme"
    if not isinstance(scheme, dict):
        raise config.error(field, f"is {scheme!r}, expected an object")
    _expect_float8(config, field, scheme)
    _expect(config, field, scheme, "dynamic", None, False)


def _expect_float8(config: ConfigFile, field: str, scheme: Mapping[str, Any]) -> None:
    _expect(config, field, scheme, "num_bits", 8)
    _expect(config, field, scheme, "type", "float")
    _expect(config, field, scheme, "symmetric", None, True)


def _expect(config: ConfigFile, field: str, values: Mapping[str, Any], name: str, *supported: object) -> None:
    if values.get(name) not in supported:
        kinds = " or ".join(repr(value) for value in supported)
        raise config.error(f"{field}.{name}", f"is {values.get(name)!r}, only {kinds} is supported")


def _expect_nothing_else(config: ConfigFile, field: str, values: Mapping[str, Any], known: frozenset[str]) -> None:
    """Fields that nothing here reads must say that there is nothing to read."""
    for name in sorted(values.keys() - known):
        if not _is_nothing(values[name]):
            raise config.error(f"{field}.{name}", f"is {values[name]!r}, which is not supported")


def _is_nothing(value: object) -> bool:
    """A field may be there and ask for nothing; so does a format of sparse weights that is "dense"."""
    return value in (None, False, {}, []) or (isinstance(value, dict) and value.get("format") == "dense")
