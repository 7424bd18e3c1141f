"""What the families share: rotary tables, the weights of a layer, and how many rows a pass is computed with."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep_kernels.linear import Layout, Packed
from lockstep_kernels.swiglu import GateUp
from lockstep_worker.weights import Checkpoint, ConfigFile, positive

ROW_UNIT = 16  # rows of a prefill pass are padded to a multiple: oneDNN compiles its products for each number of rows


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: query heads, then key heads, then value heads. head_gains [H + KH, d] float32: the norm of
    each query and key head, or None."""

    qkv: Packed
    out: Packed
    head_gains: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A pre-norm decoder layer; the gains of its norms are float32."""

    attention_norm: torch.Tensor
    attention: AttentionWeights
    mlp_norm: torch.Tensor
    gate_up: GateUp
    down: Packed


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn into angles: the base, and what stretches it."""

    theta: float
    factor: float = 1.0  # "linear": every frequency / factor; "llama3": the low ones
    low_freq_factor: float = 0.0  # 0: linear
    high_freq_factor: float = 0.0
    original_max_position: int = 0

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """[head_dim / 2] float32 angles a position."""
        f = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        if not self.low_freq_factor:
            return f / self.factor
        wavelength = 2 * math.pi / f
        long = self.original_max_position / self.low_freq_factor
        short = self.original_max_position / self.high_freq_factor
        keep = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - keep) * f / self.factor + keep * f
        return torch.where(wavelength > long, f / self.factor, torch.where(wavelength < short, f, between))

    def tables(self, positions: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [positions, head_dim] as `lockstep_kernels.rope.rotate_` wants them.

        Computed once and in float64, so that an angle's bits do not depend on how a vector loop happens to be cut.
        """
        angles = torch.outer(torch.arange(positions).float(), self.frequencies(head_dim)).double()
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), 1).to(dtype), torch.cat((-sin, sin), 1).to(dtype)


def read_rope(config: ConfigFile) -> Rope:
    """Both forms: `rope_parameters`, and the older `rope_theta` with `rope_scaling`. Raises ConfigError naming the field."""
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    values = config.get(field)
    if values is None:
        values = {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.error(field, f"is {values!r}, expected one object of plain values")
    theta = values.get("rope_theta")
    if theta is None:
        theta = config.number("rope_theta", 10000.0)
    kind = values.get("rope_type", values.get("type", "default"))

    def value(name: str) -> float:
        return positive(values.get(name), lambda why: config.error(f"{field}.{name}", why))

    if values.get("partial_rotary_factor", 1) != 1 or config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise config.error("partial_rotary_factor", "is not 1, which is not supported")
    theta = positive(theta, lambda why: config.error("rope_theta", why))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, value("factor"))
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if low >= high:
            raise config.error(f"{field}.high_freq_factor", f"is {high}, expected more than low_freq_factor ({low})")
        return Rope(theta, value("factor"), low, high, int(value("original_max_position_embeddings")))
    raise config.error(f"{field}.rope_type", f"is {kind!r}, which is not one of default, linear, llama3")


def padded_rows(tokens: int, layout: Layout, deterministic: bool) -> int:
    """How many rows a pass over `tokens` tokens is computed with.

    For oneDNN at least two, as products of one row add in another order, and many are rounded up, so that the products of
    at most a few dozen sizes are ever compiled and kept.
    """
    if layout is Layout.HALF:
        return tokens
    if tokens > ROW_UNIT:
        return -(-tokens // ROW_UNIT) * ROW_UNIT
    return max(tokens, 2) if deterministic else tokens


def config_hash(config: ConfigFile, checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """Hex digest over config.json, the compute dtype and the headers of the weights."""
    facts: Mapping[str, Any] = {
        "config": config.values,
        "dtype": str(dtype),
        "weights": list(checkpoint.headers()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_full_attention(config: ConfigFile, max_model_len: int) -> None:
    """Raises ConfigError naming the field if a layer would see less than all earlier positions."""
    kinds = config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise config.error("layer_types", f"is {kinds!r}, expected a list")
    others = sorted({str(kind) for kind in kinds or ()} - {"full_attention"})
    if others:
        raise config.error("layer_types", f"has {others}: only full_attention is supported")
    if config.get("sliding_window") is None or not config.flag("use_sliding_window", True):
        return
    window = config.integer("sliding_window")
    if window < max_model_len:
        raise config.error("sliding_window", f"is {window}, less than the {max_model_len} positions: not supported")
