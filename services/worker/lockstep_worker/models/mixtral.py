"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from lockstep_worker.experts import ExpertNames, load_expert_mlp, read_routing
from lockstep_worker.models.decoder import Decoder, FeedForward, WeightSource, load_decoder, read_decoder
from lockstep_worker.weights import Checkpoint, ConfigFile, Loading

NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def load(config: ConfigFile, checkpoint: Checkpoint, how: Loading) -> Decoder:
    """See `lockstep_worker.models.load_model`."""
    c = read_decoder(config, qkv_bias=False, out_bias=False, head_norms=False)
    routing = read_routing(config, "num_local_experts", scoring="softmax", renormalise=True)
    width = config.integer("intermediate_size")

    def feed_forward(weights: WeightSource, i: int, prefix: str) -> FeedForward:
        norm = f"{prefix}post_attention_layernorm"
        stacked = f"{prefix}mlp.experts.gate_up_proj" in checkpoint  # as transformers keeps them; it stores them apart
        mlp = f"{prefix}mlp." if stacked else f"{prefix}block_sparse_moe."
        return load_expert_mlp(weights, norm, mlp, routing, hidden=c.hidden, width=width, names=NAMES)

    return load_decoder(c, config, checkpoint, how, feed_forward, routed_experts=True)
