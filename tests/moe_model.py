"""A tiny mixture of experts in Hugging Face's format with random weights, in the form of Qwen3-MoE or of DeepSeek-V3.

For tests that serve, shard or move experts. Scales keep logits and the gate's scores apart, so that greedy answers and choices
of experts are not near ties. The same arguments give the same bytes. Written without transformers, so that what reads it is
checked against it independently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from lockstep_bench.tokenizer import SPECIALS, write_tokenizer

Form = Literal["qwen3-moe", "deepseek-v3"]
Tensors = dict[str, torch.Tensor]
Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class MoeShape:
    """What both forms have. DeepSeek-V3's first layer is dense and the others have one shared expert beside the routed ones."""

    experts: int = 8
    layers: int = 2
    top_k: int = 2
    vocab: int = 320
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2  # of Qwen3-MoE
    expert_width: int = 32
    dense_width: int = 96  # of DeepSeek-V3's first layer
    groups: int = 2  # of experts, in DeepSeek-V3; both are open to every token
    max_model_len: int = 1024

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def make_tiny_moe(
    directory: Path,
    *,
    form: Form = "qwen3-moe",
    experts: int = 8,
    layers: int = 2,
    seed: int = 0,
    shape: MoeShape | None = None,
) -> Path:
    """Writes config.json, model.safetensors (float32) and the tokenizer's files; returns the directory.

    A `shape` replaces `experts` and `layers`. ValueError for shapes that the form does not have.
    """
    shape = shape or MoeShape(experts=experts, layers=layers)
    if form == "deepseek-v3" and (shape.layers < 2 or shape.experts % shape.groups):
        raise ValueError(f"DeepSeek-V3's form takes at least 2 layers, and experts in groups of one size: {shape}")
    write_tokenizer(directory, vocab_size=shape.vocab, max_model_len=shape.max_model_len)
    (directory / "config.json").write_text(json.dumps(config(form, shape), indent=1) + "\n")
    save_file(weights(form, shape, seed), str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def config(form: Form, shape: MoeShape) -> dict[str, Any]:
    """The fields of config.json."""
    bos, *eos = range(shape.vocab - len(SPECIALS), shape.vocab)
    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    return common | (_qwen3_moe(shape) if form == "qwen3-moe" else _deepseek_v3(shape))


def _qwen3_moe(shape: MoeShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "num_experts": shape.experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_v3(shape: MoeShape) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": shape.heads,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "n_group": shape.groups,
        "topk_group": shape.groups,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "kv_lora_rank": 2 * shape.head,
        "qk_nope_head_dim": shape.head,
        "qk_rope_head_dim": shape.head,
        "v_head_dim": shape.head,
    }


def weights(form: Form, shape: MoeShape, seed: int) -> Tensors:
    """Drawn in a fixed order."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, scale: float = 2.0) -> torch.Tensor:
        """Values that keep `scale` times the mean square root of what they are multiplied with."""
        return torch.mul(torch.randn(*size, generator=generator), scale / size[-1] ** 0.5)

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    attention = _grouped_query_attention if form == "qwen3-moe" else _latent_attention
    tensors = {"model.embed_tokens.weight": draw(shape.vocab, shape.hidden, scale=shape.hidden**0.5)}
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}self_attn.{name}": tensor for name, tensor in attention(shape, draw, gain).items()}
        dense = form == "deepseek-v3" and i == 0
        block = _mlp(shape.hidden, shape.dense_width, draw) if dense else _experts(form, shape, draw)
        tensors |= {f"{layer}mlp.{name}": tensor for name, tensor in block.items()}
        tensors[f"{layer}input_layernorm.weight"] = gain(shape.hidden)
        tensors[f"{layer}post_attention_layernorm.weight"] = gain(shape.hidden)
    tensors["model.norm.weight"] = gain(shape.hidden)
    tensors["lm_head.weight"] = draw(shape.vocab, shape.hidden, scale=4.0)
    return tensors


def _grouped_query_attention(shape: MoeShape, draw: Draw, gain: Draw) -> Tensors:
    return {
        "q_proj.weight": draw(shape.heads * shape.head, shape.hidden),
        "k_proj.weight": draw(shape.kv_heads * shape.head, shape.hidden),
        "v_proj.weight": draw(shape.kv_heads * shape.head, shape.hidden),
        "o_proj.weight": draw(shape.hidden, shape.heads * shape.head),
        "q_norm.weight": gain(shape.head),
        "k_norm.weight": gain(shape.head),
    }


def _latent_attention(shape: MoeShape, draw: Draw, gain: Draw) -> Tensors:
    rank = 2 * shape.head
    return {
        "q_proj.weight": draw(shape.heads * 2 * shape.head, shape.hidden),
        "kv_a_proj_with_mqa.weight": draw(rank + shape.head, shape.hidden),
        "kv_a_layernorm.weight": gain(rank),
        "kv_b_proj.weight": draw(shape.heads * 2 * shape.head, rank),
        "o_proj.weight": draw(shape.hidden, shape.heads * shape.head),
    }


def _experts(form: Form, shape: MoeShape, draw: Draw) -> Tensors:
    """The gate's logits are spread by 2."""
    tensors = {"gate.weight": draw(shape.experts, shape.hidden)}
    if form == "deepseek-v3":
        tensors["gate.e_score_correction_bias"] = draw(shape.experts, scale=0.1 * shape.experts**0.5)
        shared = _mlp(shape.hidden, shape.expert_width, draw)
        tensors |= {f"shared_experts.{name}": tensor for name, tensor in shared.items()}
    for e in range(shape.experts):
        expert = _mlp(shape.hidden, shape.expert_width, draw)
        tensors |= {f"experts.{e}.{name}": tensor for name, tensor in expert.items()}
    return tensors


def _mlp(hidden: int, width: int, draw: Draw) -> Tensors:
    return {
        "gate_proj.weight": draw(width, hidden),
        "up_proj.weight": draw(width, hidden),
        "down_proj.weight": draw(hidden, width),
    }
