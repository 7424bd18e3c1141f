"""What a model's step moves and computes, from its config.json: bytes and floating point operations, no time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of the numbers that are stored and sent."""

    weight: float = 2.0
    kv: float = 2.0
    dispatched: float = 2.0  # a value on its way to an expert
    combined: float = 2.0  # a value on its way back
    activation: float = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sums over all layers unless said otherwise. A "dense" weight is read and used by every token of a rank: attention,
    dense MLPs, shared experts. Operations count a multiply and an add as two."""

    layers: int
    moe_layers: int
    dense_bytes: float
    dense_flops: float  # a token
    head_bytes: float
    head_flops: float  # a row that is sampled
    kv_bytes: float  # a token of context
    prefill_pair_flops: float  # a query and a key
    decode_pair_flops: float
    expand_flops: float  # a cached token whose keys and values a prompt pass makes anew (latent attention)
    activation_bytes: float  # a token: each product's input and output written and read once more
    experts: int  # routed ones of a layer; 0 none
    chosen: int  # of them, by a token
    expert_bytes: float  # one expert of one layer
    expert_flops: float  # a token, one expert, one layer
    expert_activation_bytes: float
    dispatch_bytes: float  # a token, one layer, one copy
    combine_bytes: float


def shape(config: Mapping[str, Any], widths: Widths | None = None) -> Shape:
    """The shape of a model of the Llama, Qwen3, Qwen3-MoE or DeepSeek (V2, V3) kind; ConfigError names what is missing."""
    widths = widths or Widths()
    try:
        return _shape(config, widths)
    except KeyError as error:
        raise ConfigError(f"the model's config has no {error}") from None


def _shape(config: Mapping[str, Any], widths: Widths) -> Shape:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attention = _latent(config) if "kv_lora_rank" in config else _grouped(config)
    experts = config.get("n_routed_experts") or config.get("num_experts") or 0
    moe_layers = layers - config.get("first_k_dense_replace", 0) if experts else 0
    inner = config.get("moe_intermediate_size", 0)
    shared = inner * (config.get("n_shared_experts") or 0)
    products = layers * attention.products
    products += _mlp(hidden, config["intermediate_size"]) * (layers - moe_layers)
    products += (_mlp(hidden, shared) if shared else []) * moe_layers + [(hidden, experts)] * moe_layers
    weights = sum(a * b for a, b in products)
    routed = _mlp(hidden, inner)
    head = hidden * config["vocab_size"]
    twice = 2 * widths.activation  # written by one operation, read by the next
    return Shape(
        layers=layers,
        moe_layers=moe_layers,
        dense_bytes=weights * widths.weight,
        dense_flops=2.0 * weights,
        head_bytes=head * 2.0,  # in 16 bits in all of them
        head_flops=2.0 * head,
        kv_bytes=layers * attention.kv_values * widths.kv,
        prefill_pair_flops=2.0 * layers * attention.prefill_pair,
        decode_pair_flops=2.0 * layers * attention.decode_pair,
        expand_flops=2.0 * layers * attention.expand,
        activation_bytes=twice * sum(a + b for a, b in products),
        experts=experts,
        chosen=config["num_experts_per_tok"] if experts else 0,
        expert_bytes=sum(a * b for a, b in routed) * widths.weight,
        expert_flops=2.0 * sum(a * b for a, b in routed),
        expert_activation_bytes=twice * sum(a + b for a, b in routed),
        dispatch_bytes=hidden * widths.dispatched,
        combine_bytes=hidden * widths.combined,
    )


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer. Products are (in, out) of each linear; pairs count multiplications of one query with one key."""

    products: list[tuple[int, int]]
    kv_values: int
    prefill_pair: int
    decode_pair: int
    expand: int = 0


def _grouped(config: Mapping[str, Any]) -> _Attention:
    hidden, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    pair = 2 * heads * size
    return _Attention(
        products=[(hidden, (heads + 2 * groups) * size), (heads * size, hidden)],
        kv_values=2 * groups * size,
        prefill_pair=pair,
        decode_pair=pair,
    )


def _latent(config: Mapping[str, Any]) -> _Attention:
    """Prompts use expanded keys and values, decode the latents themselves (absorbed projections)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    low = config.get("q_lora_rank")
    query = heads * (nope + rope)
    expand = (latent, heads * (nope + value))
    return _Attention(
        products=[
            *([(hidden, low), (low, query)] if low else [(hidden, query)]),
            (hidden, latent + rope),
            expand,
            (heads * value, hidden),
        ],
        kv_values=latent + rope,
        prefill_pair=heads * (nope + rope + value),
        decode_pair=heads * (2 * latent + rope),
        expand=expand[0] * expand[1],
    )


def _mlp(hidden: int, inner: int) -> list[tuple[int, int]]:
    """Gate and up in one product, then down."""
    return [(hidden, 2 * inner), (inner, hidden)]
