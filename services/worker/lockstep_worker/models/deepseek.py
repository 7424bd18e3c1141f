"""DeepSeek-V2, V2-Lite and V3: latent attention, and mixtures of experts with shared ones behind the first, dense layers.

`deterministic` holds on CPU: attention is absorbed in prompt passes and decode steps alike. On CUDA prompts are attended with
expanded keys and values and decode steps with absorbed ones: the same sums in another order, so in other bits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

import torch

from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from lockstep_kernels import mla
from lockstep_kernels.linear import Packed, linear, pack, split
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_worker.context import Division, Mirrored, MirroredAttention, Pages, Replicated, Undivided
from lockstep_worker.experts import Routing, load_expert_mlp, read_routing
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.models.attention import Apart, project
from lockstep_worker.models.decoder import (
    Decoder,
    DecoderConfig,
    FeedForward,
    WeightSource,
    load_decoder,
    read_decoder,
)
from lockstep_worker.models.layers import Rope, further_layers, yarn_mscale
from lockstep_worker.weights import Checkpoint, ConfigFile, Loading

LATENT_EPS: Final = 1e-6  # of the norms within attention, whatever rms_norm_eps is
CAPTURED_PREFIX_BYTES: Final = 1 << 26  # of the keys and values that a captured pass expands of earlier positions


@dataclass(frozen=True, slots=True)
class DeepseekConfig(DecoderConfig):
    """`head_dim` is that of the rotated part, `rope` beside `nope` in a query or key head."""

    intermediate: int
    q_rank: int | None
    rank: int
    nope: int
    value: int
    interleaved: bool
    routing: Routing
    expert_intermediate: int
    shared_experts: int
    dense_layers: int

    @property
    def scale(self) -> float:
        """Of the scores. YaRN sharpens them here, on both sides, and not in cos and sin."""
        sharpness = yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) if self.rope.mscale_all_dim else 1.0
        return float((self.nope + self.head_dim) ** -0.5 * sharpness**2)


def read_config(config: ConfigFile) -> DeepseekConfig:
    """Raises ConfigError naming the field that is missing or that this family does not have."""
    third = config.get("architectures")[0] == "DeepseekV3ForCausalLM"
    biased = config.flag("attention_bias", False)
    base = read_decoder(config, qkv_bias=biased, out_bias=biased, head_norms=False)
    if base.kv_heads != base.heads:
        raise config.error("num_key_value_heads", f"is {base.kv_heads}: latent attention has one for each query head")
    if config.flag("mlp_bias", False):
        raise config.error("mlp_bias", "is true, which is not supported")
    if (every := config.integer("moe_layer_freq", 1)) != 1:
        raise config.error("moe_layer_freq", f"is {every}: only 1 is supported")
    rope = config.integer("qk_rope_head_dim")
    if rope % 2:
        raise config.error("qk_rope_head_dim", f"is {rope}, expected an even number")
    shared: dict[str, Any] = {field.name: getattr(base, field.name) for field in fields(base)}
    return DeepseekConfig(
        **shared | {"head_dim": rope},
        intermediate=config.integer("intermediate_size"),
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        rank=config.integer("kv_lora_rank"),
        nope=config.integer("qk_nope_head_dim"),
        value=config.integer("v_head_dim"),
        interleaved=config.flag("rope_interleave", True) if third else True,
        routing=_read_routing(config, third),
        expert_intermediate=config.integer("moe_intermediate_size"),
        shared_experts=config.count("n_shared_experts", 0),
        dense_layers=config.count("first_k_dense_replace", 0),
    )


def check_widths(config: ConfigFile, c: DeepseekConfig) -> None:
    """Raises ConfigError naming a field that latent attention has no CUDA kernels for."""
    for field, width in (("kv_lora_rank", c.rank), ("qk_rope_head_dim", c.head_dim)):
        if not mla.takes_width(width):
            raise config.error(field, f"is {width}: on CUDA it must be a power of two from 16 on")


def _read_routing(config: ConfigFile, third: bool) -> Routing:
    """V3: sigmoid scores, chosen by score + correction, groups by the sum of their two best. V2: softmax, groups by their best."""
    methods = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    method = config.get("topk_method") or methods[0]
    if method not in methods:
        raise config.error("topk_method", f"is {method!r}, expected {' or '.join(methods)}")
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if third else "softmax"
    if (found := config.get("scoring_func") or scoring) != scoring:
        raise config.error("scoring_func", f"is {found!r}, expected {scoring!r}")
    renormalise = config.flag("norm_topk_prob", third)
    scale = config.number("routed_scaling_factor", 1.0)
    if renormalise and not third:
        scale = 1.0  # V2 scales only what it does not renormalise
    group_score: Literal["max", "top2"] | None = "top2" if third else "max" if method != "greedy" else None
    return read_routing(
        config, "n_routed_experts", scoring=scoring, renormalise=renormalise, scale=scale, group_score=group_score
    )


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The attention half of a layer. `qkv` gives the query heads, or the compressed query that `q_norm` and `q` turn into
    them; then the latent and its rotated key. `apart` is there if ranks compute prompts together."""

    norm: Norm
    qkv: Packed
    q_norm: Norm | None
    q: Packed | None
    latent_norm: Norm
    expansion: mla.Expansion
    out: Packed
    width: int  # of a latent, with its rotated key
    apart: Apart | None = None

    def shared(self, ranks: int) -> LatentAttention:
        """For so many ranks that share sequences."""
        if ranks == 1:
            return replace(self, apart=None)
        sizes = [self.qkv.out_features - self.width, self.width]
        return replace(self, apart=Apart(*split(self.qkv.for_prompts, sizes)))

    def queries(self, projected: torch.Tensor) -> torch.Tensor:
        """Query heads [R, H * (nope + rope)], not rotated yet, of the first part of `qkv`'s product."""
        if self.q is None or self.q_norm is None:
            return projected
        return linear(rms_norm(projected, *self.q_norm), self.q)


class LatentPass:
    """What all layers of one pass share: angles, slots, tables. `rows` is the number of rows the pass is computed with, `room`
    how many earlier positions a captured pass of prompts may have.

    Of a `Replicated` pass attention sees what is kept here, and the other ranks' parts are merged with it.
    """

    def __init__(
        self,
        c: DeepseekConfig,
        tables: tuple[torch.Tensor, torch.Tensor],
        division: Undivided,
        rows: int,
        kv: KvCache,
        dtype: torch.dtype,
        expansion: mla.Expansion,
        room: int,
    ) -> None:
        self._c = c
        self._together = division if isinstance(division, Replicated) else None
        inputs = division.inputs
        self._tokens = inputs.token_ids.shape[0]
        cos, sin = (table[inputs.positions] for table in tables)
        captured = inputs.kind is Kind.PREFILL and not inputs.query_lens
        batch = mla.LatentBatch(
            inputs.kind is Kind.DECODE and len(inputs.seq_lens) == self._tokens,  # not tokens that are replayed
            inputs.query_lens,
            inputs.host_seq_lens,
            inputs.seq_lens,
            inputs.block_tables[0],
            kv.block_size,
            query_starts=inputs.query_starts if captured else None,
            tokens=self._tokens if captured else 0,
            cached=room if captured else 0,
        )
        self._prepared = mla.prepare(
            batch, expansion, cos, sin, inputs.slots[0], interleaved=c.interleaved, dtype=dtype
        )
        self._mixed = torch.empty(rows, c.heads * c.value, dtype=dtype, device=cos.device)
        self._mixed[self._tokens :] = 0

    def attend(
        self,
        weights: LatentAttention,
        hidden: torch.Tensor,
        cache: torch.Tensor,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The attention half of a layer: hidden [R, d], which may be overwritten, plus what attention adds to it.

        With `kept`, only of those rows; the latents of all are stored.
        """
        c = self._c
        projected = linear(hidden, weights.qkv, norm=weights.norm)
        first, latents = projected[:, : -c.rank - c.head_dim], projected[: self._tokens, -c.rank - c.head_dim :]
        q = weights.queries(first)[: self._tokens].view(-1, c.heads, c.nope + c.head_dim)

        def attend(out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
            prepared, expansion = self._prepared, weights.expansion
            mla.attention(q, latents, weights.latent_norm, cache, prepared, expansion, scale=c.scale, out=out, lse=lse)

        if self._together is None:
            attend(self._mixed)
        else:
            self._together.attend(c.heads, c.value, self._mixed, attend)
        return project(self._mixed, weights.out, hidden, kept)


class MirroredLatentPass:
    """The same of a prompt pass that ranks compute together, each its chunks (see `lockstep_worker.context`)."""

    def __init__(
        self,
        c: DeepseekConfig,
        tables: tuple[torch.Tensor, torch.Tensor],
        division: Mirrored,
        rows: int,
        kv: KvCache,
        dtype: torch.dtype,
        expansion: mla.Expansion,
    ) -> None:
        self._c = c
        self._tokens = division.rows
        self._cos, self._sin = (table[division.positions] for table in tables)
        self._pages = LatentPages(c, kv.block_size, dtype, expansion)
        self._attention = MirroredAttention(division, self._pages, kv.layer(0, 0), c.heads, c.value)
        self._mixed = torch.empty(rows, c.heads * c.value, dtype=dtype, device=self._cos.device)
        self._mixed[self._tokens :] = 0

    def attend(
        self, weights: LatentAttention, hidden: torch.Tensor, cache: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `LatentPass.attend`."""
        c, apart, tokens = self._c, weights.apart, self._tokens
        assert apart is not None
        angles, interleaved = (self._cos, self._sin), c.interleaved
        x = rms_norm(hidden, *weights.norm)
        latents = linear(x, apart.cached)[:tokens]
        mla.finish_latents_(latents, weights.latent_norm, *angles, interleaved=interleaved)

        def queries() -> torch.Tensor:
            q = weights.queries(linear(x, apart.queries))[:tokens].view(-1, c.heads, c.nope + c.head_dim)
            return mla.rotate_queries_(q, *angles, interleaved=interleaved)

        self._pages.expansion = weights.expansion
        self._attention(latents, queries, cache, self._mixed)
        return project(self._mixed, weights.out, hidden, kept)


class LatentPages:
    """Attention to latents in blocks; see `lockstep_worker.context.PagedAttention`."""

    def __init__(self, c: DeepseekConfig, block_size: int, dtype: torch.dtype, expansion: mla.Expansion) -> None:
        self._c = c
        self._block_size = block_size
        self._dtype = dtype
        self.expansion = expansion  # of the layer that attends

    def where(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def store(self, new: torch.Tensor, cache: torch.Tensor, where: torch.Tensor) -> None:
        mla.store(new, cache, where)

    def plan(self, pages: Pages) -> Any:
        lens = torch.tensor(pages.seq_lens, device=pages.table.device)
        batch = mla.LatentBatch(
            False, pages.query_lens, pages.seq_lens, lens, pages.table, self._block_size, causal=pages.causal
        )
        return mla.plan(batch, self.expansion, rope=self._c.head_dim, dtype=self._dtype)

    def attend(
        self, q: torch.Tensor, cache: torch.Tensor, plan: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        mla.attend(q, cache, plan, self.expansion, scale=self._c.scale, out=out, lse=lse)


class Deepseek(Decoder):
    """See `lockstep_worker.models.Model`."""

    _config: DeepseekConfig
    captured_prefix: int

    def __init__(self, config: DeepseekConfig, *others: object) -> None:
        super().__init__(config, *others)  # type: ignore[arg-type]
        half = self._layers[0].attention
        assert isinstance(half, LatentAttention)
        device = half.expansion.weight.device
        self._expansion = half.expansion
        del self._tables  # of another form than latent attention takes
        self._angles = latent_tables(config.rope, config.max_positions, config.head_dim, device)
        self.deterministic = self._alone_deterministic = self.deterministic and device.type == "cpu"
        self.generated_reusable = self.generated_reusable and device.type == "cpu"
        row = config.heads * (config.nope + config.value) + config.head_dim
        self.captured_prefix = CAPTURED_PREFIX_BYTES // (row * self._embedding.dtype.itemsize)

    def kv_specs(self) -> tuple[KvSpec, ...]:
        c = self._config
        return (KvSpec("latent", c.layers, 1, c.rank + c.head_dim, self._embedding.dtype, planes=1),)

    def keep_kv_in(self, dtype: torch.dtype) -> None:
        raise ConfigError(f"{self.name}: latents cannot be kept as {dtype}: give --kv-cache-dtype auto")

    def _pass(self, division: Division, rows: int, kv: KvCache, dtype: torch.dtype) -> LatentPass | MirroredLatentPass:
        c, angles, expansion = self._config, self._angles, self._expansion
        if isinstance(division, Mirrored):
            return MirroredLatentPass(c, angles, division, rows, kv, dtype, expansion)
        return LatentPass(c, angles, division, rows, kv, dtype, expansion, self.captured_prefix)


def latent_tables(rope: Rope, positions: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin float32 [positions, head_dim / 2], on the device."""
    cos, sin = rope.cos_sin(positions, head_dim)
    return cos.to(device, torch.float32), sin.to(device, torch.float32)


def load(config: ConfigFile, checkpoint: Checkpoint, how: Loading) -> Decoder:
    """See `lockstep_worker.models.load_model`."""
    c = read_config(config)
    if how.device.type == "cuda":
        check_widths(config, c)

    def feed_forward(weights: WeightSource, i: int, prefix: str) -> FeedForward:
        norm, mlp = f"{prefix}post_attention_layernorm", f"{prefix}mlp."
        if i < c.dense_layers:
            return weights.mlp(norm, mlp, c.hidden, c.intermediate)
        return load_expert_mlp(
            weights,
            norm,
            mlp,
            c.routing,
            hidden=c.hidden,
            width=c.expert_intermediate,
            shared=c.shared_experts,
            corrected=c.routing.scoring == "sigmoid",
        )

    def attention(weights: WeightSource, prefix: str) -> LatentAttention:
        return _load_attention(c, weights, prefix)

    return load_decoder(
        c,
        config,
        checkpoint,
        how,
        feed_forward,
        attention=attention,
        make=Deepseek,
        routed_experts=c.dense_layers < c.layers,
        ignored=further_layers(config, checkpoint, c.layers),
    )


def _load_attention(c: DeepseekConfig, weights: WeightSource, prefix: str) -> LatentAttention:
    attention = f"{prefix}self_attn."
    q_size, latent_size = c.heads * (c.nope + c.head_dim), c.rank + c.head_dim
    first, size = ("q_proj", q_size) if c.q_rank is None else ("q_a_proj", c.q_rank)
    names, sizes = [f"{attention}{first}", f"{attention}kv_a_proj_with_mqa"], [size, latent_size]
    if c.qkv_bias and c.q_rank is None:  # a bias on the latents only
        weight = torch.cat([weights.tensor(f"{n}.weight", s, c.hidden) for n, s in zip(names, sizes, strict=True)])
        bias = torch.nn.functional.pad(weights.tensor(f"{names[1]}.bias", latent_size), (size, 0))
        qkv = pack(weight, bias, deterministic=weights.deterministic)
    else:
        qkv = weights.linear(names, sizes, c.hidden, bias=c.qkv_bias)
    q_norm = q = None
    if c.q_rank is not None:
        q_norm = weights.norm(f"{attention}q_a_layernorm", c.q_rank)._replace(eps=LATENT_EPS)
        q = weights.linear([f"{attention}q_b_proj"], [q_size], c.q_rank)
    expansion = weights.tensor(f"{attention}kv_b_proj.weight", c.heads * (c.nope + c.value), c.rank)
    return LatentAttention(
        weights.norm(f"{prefix}input_layernorm", c.hidden),
        qkv,
        q_norm,
        q,
        weights.norm(f"{attention}kv_a_layernorm", c.rank)._replace(eps=LATENT_EPS),
        mla.pack(expansion, c.heads, c.nope),
        weights.linear([f"{attention}o_proj"], [c.hidden], c.heads * c.value, bias=c.out_bias),
        latent_size,
    )
