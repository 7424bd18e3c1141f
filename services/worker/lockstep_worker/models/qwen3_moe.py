"""Qwen3-MoE: Qwen3's attention, and experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave to them."""

from __future__ import annotations

from lockstep_worker.experts import load_expert_mlp, read_routing
from lockstep_worker.models.decoder import Decoder, FeedForward, WeightSource, load_decoder, read_decoder
from lockstep_worker.weights import Checkpoint, ConfigFile, Loading


def load(config: ConfigFile, checkpoint: Checkpoint, how: Loading) -> Decoder:
    """See `lockstep_worker.models.load_model`."""
    biased = config.flag("attention_bias", False)
    c = read_decoder(config, qkv_bias=biased, out_bias=biased, head_norms=True)
    with_experts = _layers_with_experts(config, c.layers)
    experts_field = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"  # newer files
    renormalise = config.flag("norm_topk_prob", False)
    routing = read_routing(config, experts_field, scoring="softmax", renormalise=renormalise)
    width = config.integer("moe_intermediate_size")
    dense_width = config.integer("intermediate_size") if len(with_experts) < c.layers else 0

    def feed_forward(weights: WeightSource, i: int, prefix: str) -> FeedForward:
        norm, mlp = f"{prefix}post_attention_layernorm", f"{prefix}mlp."
        if i in with_experts:
            return load_expert_mlp(weights, norm, mlp, routing, hidden=c.hidden, width=width)
        return weights.mlp(norm, mlp, c.hidden, dense_width)

    return load_decoder(
        c,
        config,
        checkpoint,
        how,
        feed_forward,
        routed_experts=bool(with_experts),
    )


def _layers_with_experts(config: ConfigFile, layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer, those in `mlp_only_layers` excepted."""
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise config.error("mlp_only_layers", f"is {dense!r}, expected a list of layer numbers")
    return frozenset(range(step - 1, layers, step)) - frozenset(dense)
