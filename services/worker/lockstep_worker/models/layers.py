"""What the families share beside `decoder`: how positions turn into angles, and checks of fields of config.json."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep_kernels.linear import Layout
from lockstep_worker.weights import Checkpoint, ConfigFile, positive

ROW_UNIT = 16  # rows of a prefill pass are padded to a multiple: oneDNN compiles its products for each number of rows


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn into angles: the base, what stretches it, and how much of a head is rotated."""

    theta: float
    factor: float = 1.0  # "linear": every frequency / factor; "llama3" and "yarn": the low ones
    low_freq_factor: float = 0.0  # llama3; 0: another kind
    high_freq_factor: float = 0.0
    original_max_position: int = 0  # llama3 and yarn
    beta_fast: float = 0.0  # yarn: faster frequencies, in turns over the original positions, stay; 0: another kind
    beta_slow: float = 0.0  # yarn: slower ones are divided
    truncate: bool = True  # yarn: the ramp between them begins and ends at whole indices
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    mscale_all_dim: float = 0.0  # yarn: what latent attention scales its scores by, see `yarn_mscale`
    partial: float = 1.0  # the share of a head that is rotated, from its beginning

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are rotated."""
        return int(head_dim * self.partial)

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """[rotary_dim / 2] float32 angles a position."""
        dim = self.rotary_dim(head_dim)
        turned = self.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        f = 1.0 / turned
        if self.beta_fast:
            keep = 1 - self._ramp(dim)
            return 1.0 / (self.factor * turned) * (1 - keep) + f * keep
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

    def cos_sin(self, positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [positions, rotary_dim / 2] float64, times the attention factor.

        In float64, so that an angle's bits do not depend on how a vector loop happens to be cut.
        """
        angles = torch.outer(torch.arange(positions).float(), self.frequencies(head_dim)).double()
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def _ramp(self, dim: int) -> torch.Tensor:
        """[dim / 2]: 0 up to the frequency of `beta_fast`, 1 from that of `beta_slow` on."""
        low, high = (
            dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """By how much attention is sharpened when positions are stretched by `factor` (YaRN, arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(config: ConfigFile, *, partial: float | None = None) -> Rope:
    """Both forms: `rope_parameters`, and the older `rope_theta` with `rope_scaling`. Raises ConfigError naming the field.

    `partial` is the default of `partial_rotary_factor`; None: this family rotates whole heads.
    """
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    values = config.get(field)
    if values is None:
        values = {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.error(field, f"is {values!r}, expected one object of plain values")

    def number(name: str, default: float | None = None) -> float:
        value = default if values.get(name) is None else values[name]
        return positive(value, lambda why: config.error(f"{field}.{name}", why))

    theta = values.get("rope_theta")
    if theta is None:
        theta = config.number("rope_theta", 10000.0)
    plain = Rope(
        positive(theta, lambda why: config.error("rope_theta", why)), partial=_read_partial(config, values, partial)
    )
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, factor=number("factor"))
    if kind not in ("llama3", "yarn"):
        raise config.error(f"{field}.rope_type", f"is {kind!r}, which is not one of default, linear, llama3, yarn")
    if config.get("original_max_position_embeddings") is not None:
        original = config.integer("original_max_position_embeddings")
    else:
        original = int(number("original_max_position_embeddings", config.integer("max_position_embeddings")))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise config.error(f"{field}.high_freq_factor", f"is {high}, expected more than low_freq_factor ({low})")
        return replace(
            plain,
            factor=number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )
    factor = number("factor", config.integer("max_position_embeddings") / original)
    mscale, all_dim = (number(name) if values.get(name) else 0.0 for name in ("mscale", "mscale_all_dim"))
    implied = yarn_mscale(factor)
    if mscale and all_dim:
        implied = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise config.error(f"{field}.truncate", f"is {truncate!r}, expected true or false")
    return replace(
        plain,
        factor=factor,
        original_max_position=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=truncate,
        attention_factor=number("attention_factor", implied),
        mscale_all_dim=all_dim,
    )


def _read_partial(config: ConfigFile, values: Mapping[str, Any], default: float | None) -> float:
    found = values.get("partial_rotary_factor")
    if found is None:
        found = config.get("partial_rotary_factor")
    if found is None:
        return 1.0 if default is None else default
    share = positive(found, lambda why: config.error("partial_rotary_factor", why))
    if default is None and share != 1:
        raise config.error("partial_rotary_factor", "is not 1, which is not supported")
    if share > 1:
        raise config.error("partial_rotary_factor", f"is {share}, expected at most 1")
    return share


def padded_rows(tokens: int, layout: Layout, deterministic: bool) -> int:
    """How many rows a pass over `tokens` tokens is computed with.

    For oneDNN at least two, as products of one row add in another order, and many are rounded up, so that the products of
    at most a few dozen sizes are ever compiled and kept.
    """
    if layout not in (Layout.ONEDNN, Layout.PLAIN):
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


def further_layers(config: ConfigFile, checkpoint: Checkpoint, layers: int) -> tuple[str, ...]:
    """Names of the layers after the model's own `layers` that predict further tokens: they are not used here."""
    prefixes = tuple(f"model.layers.{layers + i}." for i in range(config.count("num_nextn_predict_layers", 0)))
    return tuple(name for name, _, _ in checkpoint.headers() if prefixes and name.startswith(prefixes))
