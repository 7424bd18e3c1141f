"""The families of mixtures of experts whose form a dense model can take without becoming another one.

A form must have the attention of the dense model, and weights of chosen experts that can be 1:

mixtral     Llama's attention. Equal logits give k chosen experts the weight 1/k, and down projections are k times what they were:
            both are exact if k is a power of two.
qwen3-moe   The same weights; norms on the heads of queries and keys, as Qwen3 has them. A model without them cannot take this
            form: a norm changes the length of every head, whatever its gain is.
glm4-moe    With or without such norms. DeepSeek-V3's router and shared experts: a logit of 0 has the score 1/2, times a scaling
            factor of 2.

DeepSeek-V3's own form has latent attention, whose norm of the latents and one rotated key for all heads cannot say what grouped
keys say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep_kernels.moe import Routing
from lockstep_worker.models.decoder import DecoderConfig

Fields = dict[str, Any]


class Shape(NamedTuple):
    """E routed experts, k of them for a token, and shared ones for all tokens; each of the inner width `size`."""

    experts: int
    top_k: int
    shared: int
    size: int


@dataclass(frozen=True, slots=True)
class Form:
    """A family of mixtures of experts, as far as a dense model can take its form."""

    name: str
    architecture: str
    model_type: str
    module: str  # of a layer's gate and experts
    projections: tuple[str, str, str]  # gate, up and down of a routed expert
    head_norms: tuple[bool, ...]  # whether it can have none, or some
    biases: tuple[tuple[bool, bool], ...]  # on queries, keys and values; on the output
    scoring: str  # softmax: renormalised over the chosen experts; sigmoid: as the scores are
    shared: bool  # it has experts for all tokens
    fields: Callable[[Shape, DecoderConfig, Fields], Fields]  # its own, beside or instead of the given common ones

    def takes(self, c: DecoderConfig) -> bool:
        """Whether it has the attention of a dense model."""
        return c.head_norms in self.head_norms and (c.qkv_bias, c.out_bias) in self.biases

    def routing(self, shape: Shape) -> Routing:
        """Scaled so that equal logits give each chosen expert the weight 1."""
        if self.scoring == "softmax":
            return Routing(shape.experts, shape.top_k, "softmax", True, float(shape.top_k))
        return Routing(shape.experts, shape.top_k, "sigmoid", False, 2.0)

    def down_scale(self, shape: Shape) -> float:
        """What down projections of routed experts are multiplied by: the scale of `routing` if config.json has no field for it."""
        return self.routing(shape).scale if self.scoring == "softmax" else 1.0

    def config(self, dense: Fields, c: DecoderConfig, shape: Shape) -> Fields:
        """The fields of config.json, of a dense model's. Nothing is left to defaults, which differ between families."""
        rope = dense.get("rope_parameters") or dense.get("rope_scaling") or {"rope_type": "default"}
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
        common = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden,
            "num_hidden_layers": c.layers,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "max_position_embeddings": c.max_positions,
            "rms_norm_eps": c.eps,
            "rope_theta": c.rope.theta,
            "rope_parameters": {**rope, "rope_theta": c.rope.theta},
            "hidden_act": "silu",
            "attention_bias": c.qkv_bias,
            "tie_word_embeddings": c.tied,
            "num_experts_per_tok": shape.top_k,
            **{name: dense[name] for name in (*kept, "original_max_position_embeddings") if name in dense},
        }
        return common | self.fields(shape, c, common)


def _mixtral(shape: Shape, c: DecoderConfig, common: Fields) -> Fields:
    return {"num_local_experts": shape.experts, "intermediate_size": shape.size, "sliding_window": None}


def _qwen3_moe(shape: Shape, c: DecoderConfig, common: Fields) -> Fields:
    return {
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.size,
        "intermediate_size": shape.size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _glm4_moe(shape: Shape, c: DecoderConfig, common: Fields) -> Fields:
    return {
        "rope_parameters": {**common["rope_parameters"], "partial_rotary_factor": 1.0},  # 0.5 if it is not said
        "partial_rotary_factor": 1.0,
        "use_qk_norm": c.head_norms,
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.shared,
        "moe_intermediate_size": shape.size,
        "intermediate_size": shape.size,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "num_nextn_predict_layers": 0,
    }


_NO_BIAS = (False, False)
FORMS: tuple[Form, ...] = (
    Form(
        "mixtral",
        "MixtralForCausalLM",
        "mixtral",
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        head_norms=(False,),
        biases=(_NO_BIAS,),
        scoring="softmax",
        shared=False,
        fields=_mixtral,
    ),
    Form(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        module="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        head_norms=(True,),
        biases=(_NO_BIAS, (True, True)),
        scoring="softmax",
        shared=False,
        fields=_qwen3_moe,
    ),
    Form(
        "glm4-moe",
        "Glm4MoeForCausalLM",
        "glm4_moe",
        module="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        head_norms=(False, True),
        biases=(_NO_BIAS, (True, False)),
        scoring="sigmoid",
        shared=True,
        fields=_glm4_moe,
    ),
)
