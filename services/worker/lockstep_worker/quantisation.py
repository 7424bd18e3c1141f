"""Which quantised checkpoints are read: e4m3 weights with scales by block (DeepSeek-V3's form) or by row (compressed-tensors)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from lockstep_worker.weights import ConfigFile

FIELD = "quantization_config"


class Scales(enum.Enum):
    """What the scale tensors of a checkpoint's e4m3 weights are, by the ending of their names."""

    BLOCKS = "weight_scale_inv"  # one for each 128 x 128 elements
    ROWS = "weight_scale"  # one for each output channel


def read_quantisation(config: ConfigFile) -> Scales | None:
    """None if the checkpoint is not quantised. Raises ConfigError naming the field that asks for what is not supported."""
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
        return Scales.BLOCKS
    if method == "compressed-tensors":
        _read_compressed(config, found)
        return Scales.ROWS
    raise config.error(f"{FIELD}.quant_method", f"is {method!r}, which is not one of fp8, compressed-tensors")


def _read_compressed(config: ConfigFile, found: Mapping[str, Any]) -> None:
    """Every group of layers must have e4m3 weights with a scale a channel, and operands that are quantised token by token."""
    _expect(config, FIELD, found, "format", "float-quantized")
    _read_kv_scheme(config, found.get("kv_cache_scheme"))
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config.error(f"{FIELD}.config_groups", f"is {groups!r}, expected groups of layers")
    for name, group in groups.items():
        for part, strategy, dynamic in (("weights", "channel", (None, False)), ("input_activations", "token", (True,))):
            field = f"{FIELD}.config_groups.{name}.{part}"
            scheme = group.get(part) if isinstance(group, dict) else None
            if not isinstance(scheme, dict):
                raise config.error(field, f"is {scheme!r}, expected an object")
            _expect(config, field, scheme, "num_bits", 8)
            _expect(config, field, scheme, "type", "float")
            _expect(config, field, scheme, "strategy", strategy)
            _expect(config, field, scheme, "symmetric", None, True)
            _expect(config, field, scheme, "dynamic", *dynamic)


def _read_kv_scheme(config: ConfigFile, scheme: object) -> None:
    """Scales for a KV cache of 8 bits do no harm to one of 16; such a scheme may be there, any other may not."""
    if scheme is None:
        return
    field = f"{FIELD}.kv_cache_scheme"
    if not isinstance(scheme, dict):
        raise config.error(field, f"is {scheme!r}, expected an object")
    _expect(config, field, scheme, "num_bits", 8)
    _expect(config, field, scheme, "type", "float")
    _expect(config, field, scheme, "symmetric", None, True)
    _expect(config, field, scheme, "dynamic", None, False)


def _expect(config: ConfigFile, field: str, values: Mapping[str, Any], name: str, *supported: object) -> None:
    if values.get(name) not in supported:
        kinds = " or ".join(repr(value) for value in supported)
        raise config.error(f"{field}.{name}", f"is {values.get(name)!r}, only {kinds} is supported")
