"""The Llama family: Llama, SmolLM2, Mistral (full attention), Qwen2 (biases on q, k, v), Qwen3 (norms on q and k heads)."""

from __future__ import annotations

from lockstep_worker.models.decoder import Decoder, GatedMlp, WeightSource, load_decoder, read_decoder
from lockstep_worker.weights import Checkpoint, ConfigFile, Loading


def load(config: ConfigFile, checkpoint: Checkpoint, how: Loading) -> Decoder:
    """See `lockstep_worker.models.load_model`."""
    architecture = config.get("architectures")[0]
    biased = config.flag("attention_bias", False)
    qwen2 = architecture == "Qwen2ForCausalLM"
    c = read_decoder(
        config,
        qkv_bias=qwen2 or biased,
        out_bias=biased and not qwen2,
        head_norms=architecture == "Qwen3ForCausalLM",
    )
    intermediate, mlp_bias = config.integer("intermediate_size"), config.flag("mlp_bias", False)

    def feed_forward(weights: WeightSource, i: int, prefix: str) -> GatedMlp:
        norm = f"{prefix}post_attention_layernorm"
        return weights.mlp(norm, f"{prefix}mlp.", c.hidden, intermediate, bias=mlp_bias)

    return load_decoder(c, config, checkpoint, how, feed_forward)
