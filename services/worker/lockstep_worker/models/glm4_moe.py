"""GLM-4-MoE (GLM-4.5, 4.6): partly rotated heads; dense layers first, then experts routed as in DeepSeek-V3, and shared ones."""

from __future__ import annotations

from lockstep_worker.experts import load_expert_mlp, read_routing
from lockstep_worker.models.decoder import Decoder, FeedForward, WeightSource, load_decoder, read_decoder
from lockstep_worker.models.layers import further_layers
from lockstep_worker.weights import Checkpoint, ConfigFile, Loading


def load(config: ConfigFile, checkpoint: Checkpoint, how: Loading) -> Decoder:
    """See `lockstep_worker.models.load_model`."""
    c = read_decoder(
        config,
        qkv_bias=config.flag("attention_bias", False),
        out_bias=False,
        head_norms=config.flag("use_qk_norm", False),
        partial=0.5,
    )
    routing = read_routing(
        config,
        "n_routed_experts",
        scoring="sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        group_score="top2",
    )
    width, shared = config.integer("moe_intermediate_size"), config.count("n_shared_experts", 1)
    dense_layers = config.count("first_k_dense_replace", 1)
    dense_width = config.integer("intermediate_size") if dense_layers else 0

    def feed_forward(weights: WeightSource, i: int, prefix: str) -> FeedForward:
        norm, mlp = f"{prefix}post_attention_layernorm", f"{prefix}mlp."
        if i < dense_layers:
            return weights.mlp(norm, mlp, c.hidden, dense_width)
        return load_expert_mlp(weights, norm, mlp, routing, hidden=c.hidden, width=width, shared=shared, corrected=True)

    return load_decoder(
        c,
        config,
        checkpoint,
        how,
        feed_forward,
        routed_experts=dense_layers < c.layers,
        ignored=further_layers(config, checkpoint, c.layers),
    )
